"""Policies by the names of their papers: a scorer, an apportioner and their parameters.

Not among them is KVzip (arXiv 2505.23416): it scores by a second forward pass over the whole
prompt, repeated, which does not fit into prefill.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

DEFAULT_POLICY = "kv-compress"
#: Last positions that are kept where neither request nor preset says how many.
MIN_RECENT = 32


@dataclasses.dataclass(frozen=True)
class Preset:
    """A named policy.

    Attributes
    ----------
    source : the paper.
    parameters : of scorer and apportioner, where they differ from the methods' defaults.
    sinks, recent : first and last positions that are always kept; `recent` None means as
        many as the scorer's window holds, at least `MIN_RECENT`.
    """

    scorer: str
    apportioner: str
    source: str
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sinks: int = 4
    recent: int | None = None


PRESETS: dict[str, Preset] = {
    # --- by the last queries' attention ---
    "kv-compress": Preset(
        "attention-window", "global", "KV-Compress, arXiv 2410.00161",
        # The paper's 8 and 7 miss questions asked further up, its 0 what a copy needs next.
        {"window": 32, "pool": 9, "profile_power": 2.0},
    ),
    "snapkv": Preset(
        "attention-window", "uniform", "SnapKV, arXiv 2404.14469",
        {"window": 32, "norm": "l1"},
    ),
    "pyramidkv": Preset(
        "attention-window", "pyramid", "PyramidKV, arXiv 2406.02069",
        {"window": 8, "norm": "l1"},
    ),
    "ada-kv": Preset(
        "attention-window", "adaptive", "Ada-KV, arXiv 2407.11550",
        {"window": 32, "norm": "l1"},
    ),
    "criticalkv": Preset("critical", "uniform", "CriticalKV, arXiv 2502.03805"),
    "defensivekv": Preset("defensive", "adaptive", "DefensiveKV, arXiv 2510.13334"),
    "cake": Preset("cake", "cake", "CAKE, arXiv 2503.12491"),
    "fastgen": Preset("fastgen", "global", "FastGen, arXiv 2310.01801", sinks=0),
    "tova": Preset("tova", "uniform", "TOVA, arXiv 2401.06104", sinks=0, recent=1),
    "scissorhands": Preset(
        "scissorhands", "uniform", "Scissorhands, arXiv 2305.17118", sinks=0, recent=10
    ),
    # --- by every query's ---
    "h2o": Preset(
        "full-attention", "uniform", "H2O, arXiv 2306.14048",
        {"norm": "l1", "recent_share": 0.5}, sinks=0,
    ),
    "kvc-full": Preset("full-attention", "global", "KVC-full, KV-Compress, arXiv 2410.00161"),
    "keyformer": Preset("keyformer", "uniform", "Keyformer, arXiv 2403.09054", sinks=0),
    "expected-attention": Preset(
        "expected-attention", "adaptive", "Expected Attention, arXiv 2510.00636"
    ),
    # --- by keys and values alone ---
    "knorm": Preset(
        "knorm", "uniform", "L2 norm-based compression, arXiv 2406.11430", sinks=0
    ),
    "keydiff": Preset("keydiff", "uniform", "KeyDiff, arXiv 2504.15364", sinks=0),
    "lagkv": Preset("lagkv", "uniform", "LagKV, arXiv 2504.04704"),
    # --- by what a head is for; the papers' 4,000 and 256 recent keys suit far longer prompts ---
    "razor-attention": Preset(
        "attention-window", "head-profile", "RazorAttention, arXiv 2407.15891",
        {"retrieval": 0.15}, recent=64,
    ),
    "duo-attention": Preset(
        "attention-window", "head-profile", "DuoAttention, arXiv 2410.10819",
        {"retrieval": 0.25}, recent=64,
    ),
    # --- by position, and the baseline ---
    "streaming-llm": Preset("recency", "uniform", "StreamingLLM, arXiv 2309.17453"),
    "random": Preset("random", "uniform", "the baseline"),
}  # fmt: skip
