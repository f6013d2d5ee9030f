"""Policies by the names of their papers: a scorer, an apportioner and their parameters.

Not among them is KVzip (arXiv 2505.23416) itself: it scores by a second forward pass over the whole
prompt, repeated, which does not fit into prefill; virtual-repeat is made after it. Nor is Task-KV
(arXiv 2501.15113): some of its heads keep everything, however small the budget, and no code of its
authors is public that says how those heads are completed and that a version within a budget could
be held against.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

DEFAULT_POLICY = "kv-compress"
#: The default where the question comes after compression, so that no score can ask it.
DEFAULT_QUESTION_APART = "virtual-repeat"
#: Last positions that are kept where neither request nor preset says how many.
MIN_RECENT = 32


@dataclasses.dataclass(frozen=True)
class Preset:
    """A named policy.

    Attributes
    ----------
    source : the paper.
    differs : how it differs from the paper in what is kept, in a line or two; empty if it does not.
        Not repeated everywhere: selection is by pages (docs/design.md), query heads that share
        a KV head share its cache, and sinks and recent keys are kept under every policy.
    parameters : of scorer and apportioner, where they differ from the methods' defaults.
    sinks, recent : first and last positions that are always kept; `recent` None means as
        many as the scorer's window holds, at least `MIN_RECENT`.
    """

    scorer: str
    apportioner: str
    source: str
    differs: str
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sinks: int = 4
    recent: int | None = None


_WINDOW = "The window's own keys take at most a quarter of the budget; the paper keeps them all."
_ONCE = "Compresses once, after prefill"
_ASKED = "Compresses in decode only if the request gives recompress_every"

PRESETS: dict[str, Preset] = {
    # --- by the last queries' attention ---
    "kv-compress": Preset(
        "attention-window", "global", "KV-Compress, arXiv 2410.00161",
        "Window 32 and scores that fade to neighbours, further in heads that retrieve if there is "
        "a head profile; the paper has 8 and a pool of 7 (kvc-paper). On real text whole sentences "
        f"must stay. 4 sinks. {_ASKED}.",
        {"window": 32, "pool": 1, "half_life": 2.5, "profile_reach": 1.5},
    ),
    "kvc-paper": Preset(
        "attention-window", "global", "KVC-w, KV-Compress, arXiv 2410.00161",
        f"{_ASKED}, every so many tokens; the paper at every step.",
        {"window": 8, "pool": 7, "profile_power": 0.0}, sinks=0, recent=8,
    ),
    "kvc-full": Preset(
        "full-attention", "global", "KVC-full, KV-Compress, arXiv 2410.00161",
        f"{_ASKED}, every so many tokens; the paper at every step.",
        {"excluded": 10}, sinks=0, recent=32,
    ),
    "snapkv": Preset(
        "attention-window", "uniform", "SnapKV, arXiv 2404.14469", _WINDOW,
        {"window": 32, "norm": "l1"},
    ),
    "pyramidkv": Preset(
        "attention-window", "pyramid", "PyramidKV, arXiv 2406.02069",
        f"{_WINDOW} Budgets fall linearly however small the last layer's is; the authors' code "
        "turns uniform when it would be less than the window.",
        {"window": 8, "norm": "l1"},
    ),
    "ada-kv": Preset(
        "attention-window", "adaptive", "Ada-KV, arXiv 2407.11550",
        f"{_WINDOW} A head's floor is given before heads compete; the authors' code mixes it in "
        "after.",
        {"window": 32, "norm": "l1"},
    ),
    "criticalkv": Preset("critical", "uniform", "CriticalKV, arXiv 2502.03805", _WINDOW),
    "defensivekv": Preset("defensive", "adaptive", "DefensiveKV, arXiv 2510.13334", _WINDOW),
    "cake": Preset(
        "cake", "cake", "CAKE, arXiv 2503.12491",
        f"{_WINDOW} Its temperatures are 1; the paper tunes them for each model and budget.",
    ),
    "fastgen": Preset(
        "fastgen", "by-need", "FastGen, arXiv 2310.01801",
        "A head's kind is found by the last 64 queries, in the paper by all. The budget is fixed "
        "before: if it is less than the kinds need, every head keeps the same share of its need; "
        f"if it is more, nothing is given back. {_ONCE}.",
        sinks=0,
    ),
    "tova": Preset(
        "tova", "uniform", "TOVA, arXiv 2401.06104",
        f"{_ONCE}, by the prompt's last query; the paper drops a key at every step.",
        sinks=0, recent=1,
    ),
    "scissorhands": Preset(
        "scissorhands", "uniform", "Scissorhands, arXiv 2305.17118",
        f"{_ONCE}; the paper whenever the buffer is full, also in decode. All layers get the "
        "same; keys of equal count rank by attention.",
        sinks=0, recent=10,
    ),
    # --- by every query's ---
    "h2o": Preset(
        "full-attention", "uniform", "H2O, arXiv 2306.14048",
        "All of the prompt's attention is summed before anything is dropped, and in decode "
        "(recompress_every) so many tokens are; the paper drops a key at every step, in the prompt "
        "too.",
        {"norm": "l1", "recent_share": 0.5}, sinks=0,
    ),
    "keyformer": Preset(
        "keyformer", "uniform", "Keyformer, arXiv 2403.09054",
        f"{_ONCE}, at one temperature; the paper drops a key at every step of decode and raises "
        "the temperature.",
        sinks=0,
    ),
    "virtual-repeat": Preset(
        "virtual-repeat", "global", "after KVzip, arXiv 2505.23416",
        "KVzip reads the prompt a second time. Here the first reading's queries, moved on, stand "
        "for the second's, in parts of 256 tokens (paper: 2,048); attention of the last 32 queries "
        f"counts too, and scores fade to neighbours. {_ASKED}.",
        {"window": 32, "window_weight": 1.0, "half_life": 3.0, "profile_power": 0.25},
    ),
    "virtual-repeat-copy": Preset(
        "virtual-repeat", "global", "after KVzip, arXiv 2505.23416",
        "virtual-repeat by the second reading and by how little a key's others can stand for it "
        f"(leverage), without neighbours: for copies asked for after compression. {_ASKED}.",
        {"window": 1, "leverage": 1.0, "profile_power": 1.0},
    ),
    "virtual-repeat-echo": Preset(
        "virtual-repeat", "global", "after KVzip, arXiv 2505.23416",
        "virtual-repeat-copy that also asks the prompt's last 64 tokens again: for a question "
        f"inside the prompt that is about much of it, or asks for a copy. {_ASKED}.",
        {"window": 64, "leverage": 1.0, "echo": 3.0, "repeat_power": 1.0}, recent=32,
    ),
    "expected-attention": Preset(
        "expected-attention", "adaptive", "Expected Attention, arXiv 2510.00636",
        f"{_ONCE}; the paper also in decode.",
    ),
    # --- by keys and values alone ---
    "knorm": Preset(
        "knorm", "uniform", "L2 norm-based compression, arXiv 2406.11430",
        f"{_ONCE}, in all layers and with the newest 32 keys kept; the paper spares the first two "
        "layers.",
        sinks=0,
    ),
    "keydiff": Preset(
        "keydiff", "uniform", "KeyDiff, arXiv 2504.15364",
        "The whole prompt is compared at once; the paper also evicts block by block while it "
        "reads it.",
        sinks=0,
    ),
    "lagkv": Preset(
        "lagkv", "uniform", "LagKV, arXiv 2504.04704",
        f"{_ONCE}; the paper part by part as the cache grows, also in decode.",
    ),
    # --- budgets of layers and heads together ---
    "ada-pyramidkv": Preset(
        "attention-window", "adaptive-pyramid", "Ada-PyramidKV, Ada-KV, arXiv 2407.11550",
        f"{_WINDOW} A head's floor is given before heads compete; the authors' code mixes it in "
        "after.",
        {"window": 32, "norm": "l1"},
    ),
    "layer-defensivekv": Preset(
        "defensive", "global", "Layer-DefensiveKV, DefensiveKV, arXiv 2510.13334",
        f"{_WINDOW} The first stage's keys come before all others of the model; the authors' code "
        "puts them level with the best of their layer.",
    ),
    "compresskv": Preset(
        "compress-kv", "by-error", "CompressKV, arXiv 2508.02401",
        "Which heads retrieve is RazorAttention's measure of KV heads, one a layer; the paper has "
        "four query heads, by attention to needles. Layers' errors are those of the prompt's own "
        "last queries; the paper measures them beforehand on LongBench.",
    ),
    # --- by attention to parts of the prompt, or by place ---
    "windowkv": Preset(
        "window-kv", "stepped-pyramid", "WindowKV, arXiv 2503.17922",
        f"{_WINDOW} The request says whether half of a run's keys count (best 0.5) or all, with a "
        "window of 16; the paper trains a classifier of tasks for it.",
    ),
    "kvcrush": Preset(
        "kv-crush", "uniform", "KVCrush, arXiv 2503.00022",
        f"{_WINDOW} {_ONCE}. A behaviour has one bit a KV head; every head chooses its "
        "representatives among the keys that it would drop itself.",
    ),
    "lacache": Preset(
        "la-cache", "uniform", "LaCache, arXiv 2507.14204",
        f"{_ONCE}; the paper compacts again whenever the cache is full, also in decode. Keys keep "
        "the rotation of their place in the text.",
    ),
    # --- made for long answers ---
    "r-kv": Preset(
        "r-kv", "uniform", "R-KV, arXiv 2505.24133",
        "In decode the group's mean attention over all keys counts; in the paper its largest "
        f"logits over the keys before the window, as here for the prompt. {_ASKED}; the paper "
        "every 128 tokens.",
        recent=8,
    ),
    "triattention": Preset(
        "tri-attention", "uniform", "TriAttention, arXiv 2604.04921",
        "The queries' centres are those of the prompt, also in decode; the paper's come from a "
        f"calibration. The prompt is compressed too. {_ASKED}; the paper every 128 tokens.",
    ),
    # --- by what a head is for; the papers' 4,000 and 256 recent keys suit far longer prompts ---
    "razor-attention": Preset(
        "attention-window", "head-profile", "RazorAttention, arXiv 2407.15891",
        "Retrieval heads keep what the budget holds, by attention, in the paper everything. No "
        "compensation token: what is dropped cannot be one KV, as attention gives every KV the "
        "weight of one. 64 recent keys where the paper has 4,000 or a fifth of the prompt.",
        {"retrieval": 0.15}, recent=64,
    ),
    "duo-attention": Preset(
        "attention-window", "head-profile", "DuoAttention, arXiv 2410.10819",
        "Which heads retrieve is RazorAttention's measure, 25 % of them; the paper trains a gate "
        "for each head. Retrieval heads keep what the budget holds, by attention, in the paper "
        "everything. 64 recent keys where the paper has 256.",
        {"retrieval": 0.25}, recent=64,
    ),
    # --- by position, and the baseline ---
    "streaming-llm": Preset(
        "recency", "uniform", "StreamingLLM, arXiv 2309.17453",
        "In decode the window slides by recompress_every tokens, if the request gives it; in the "
        "paper always, by one. Keys keep the rotation of their place in the text; in the paper "
        "they get that of their place in the cache.",
    ),
    "random": Preset("random", "uniform", "the baseline", ""),
}  # fmt: skip


def default_policy(question_apart: bool) -> str:
    """The policy of a request that names none.

    Parameters
    ----------
    question_apart : whether the question comes after compression (`question_tokens`).
    """
    return DEFAULT_QUESTION_APART if question_apart else DEFAULT_POLICY
