"""What a compression takes as it is served: the product's functions, for the prompts of a batch."""

from __future__ import annotations

import dataclasses

import torch
from kvc_kernels.compact import compact

from bench.gpu.cases import Case
from bench.gpu.records import Records, Skipped, queued_ms
from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.policy.kvs import PromptKVs
from sgl_kvc.policy.scores import PromptScores, score_together
from sgl_kvc.spec import CompressionSpec, Extent, parse

#: Prompts of a batch, and tokens of each.
BATCHES = ((1, 2000), (1, 8000), (4, 2000), (1, 32000), (1, 128000))
RATES = (2, 8)
POLICY = "kv-compress"


@dataclasses.dataclass
class Prompts:
    """Prompts of a batch in one pool, at the end of their prefill.

    Attributes
    ----------
    spec, extent : of each of them.
    arena_k, arena_v : [num_blocks, L, H, P, D].
    slots : of the prompts, [prompts, tokens].
    target : blocks of their segments, [prompts, segment blocks].
    queries, lse : of the last window, [w, H*G, D] and [w, H*G], in every layer the same.
    facts : a head profile, without which the default policy has less to do.
    """

    case: Case
    tokens: int
    spec: CompressionSpec
    extent: Extent
    arena_k: torch.Tensor
    arena_v: torch.Tensor
    slots: torch.Tensor
    target: torch.Tensor
    queries: torch.Tensor
    lse: torch.Tensor
    facts: ModelFacts

    @classmethod
    def make(cls, case: Case, prompts: int, tokens: int, rate: float) -> Prompts:
        """Of random KVs. Raises Skipped where they do not fit."""
        size, device = case.size, case.device
        spec = parse({"rate": rate, "policy": POLICY, "min_tokens": 0})
        extent = Extent.of(spec, tokens, size.page)
        blocks = -(-tokens // size.page)
        total = 1 + prompts * (blocks + extent.segment_blocks)
        taken = size.bytes_of(total * size.page, case.dtype)
        if device == "cuda" and taken > 0.7 * torch.cuda.mem_get_info()[0]:
            raise Skipped(f"{taken / 1e9:.0f} GB do not fit")
        shape = total, size.layers, size.heads, size.page, size.dim
        arenas = [torch.empty(shape, dtype=case.dtype, device=device).normal_() for _ in range(2)]
        order = torch.randperm(total - 1, device=device) + 1
        mine = order[: prompts * blocks].view(prompts, blocks, 1) * size.page
        slots = (mine + torch.arange(size.page, device=device)).flatten(1)[:, :tokens]
        heads = size.heads * size.group
        return cls(
            case, tokens, spec, extent, *arenas, slots.int().contiguous(),
            order[prompts * blocks :].view(prompts, -1),
            case.query(spec.window),
            torch.full((spec.window, heads), float(tokens), device=device).log(),
            ModelFacts(head_profile=torch.rand(size.layers, size.heads, device=device)),
        )  # fmt: skip

    def begin(self) -> list[PromptScores]:
        """What the radix cache makes when a prompt comes in."""
        size = self.case.size
        return [
            PromptScores(
                self.spec, self.extent, [0] * self.tokens, size.page, size.layers, self.facts
            )
            for _ in self.slots
        ]

    def score(self, scored: list[PromptScores]) -> list[PromptScores]:
        """What the attention backend does beside the layers of a prefill's last chunk."""
        size, tables = self.case.size, {}
        for layer in range(size.layers):
            found = []
            for scores, slots in zip(scored, self.slots, strict=True):
                kvs = self._kvs(layer, slots)
                context = scores.look(layer, self.queries, kvs, self.case.scale, self.lse)
                found.append((scores, context))
            score_together(found, tables)
        return scored

    def _kvs(self, layer: int, slots: torch.Tensor) -> PromptKVs:
        keys, size = self.arena_k[:, layer], self.case.size

        def none() -> torch.Tensor:
            raise AssertionError("keys and values are read where they lie")

        return PromptKVs(self.tokens, size.heads, keys.device, none, none, keys, slots)


def run(records: Records, case: Case, *, smoke: bool) -> None:
    """Records of scores, selection and copy, for a batch of prompts each."""
    for prompts, tokens in ((1, 64), (2, 64)) if smoke else BATCHES:
        for rate in RATES:
            facts = {"prompts": prompts, "tokens": tokens, "rate": rate, "policy": POLICY}
            with records.attempt("compression", layers=case.size.layers, **facts) as found:
                found |= measure(case, prompts, tokens, rate)


def measure(case: Case, prompts: int, tokens: int, rate: float) -> dict:
    """Milliseconds of each step on the device, and of the host to launch it; `ms` is their sum."""
    given, device = Prompts.make(case, prompts, tokens, rate), case.device
    scored = given.score(given.begin())
    chosen = [scores.select() for scores in scored]

    def copy(_: None) -> None:
        for slots, one, target in zip(given.slots, chosen, given.target, strict=True):
            compact(given.arena_k, given.arena_v, slots, one.positions, one.pages, target)

    found: dict = {
        "score": queued_ms(given.begin, given.score, device),
        "select": queued_ms(lambda: scored, lambda all_: [one.select() for one in all_], device),
        "compact": queued_ms(lambda: None, copy, device),
    }
    found["ms"] = sum(step["ms"] for step in found.values())
    size = case.size
    read = size.bytes_of(prompts * tokens, case.dtype) / 2
    moved = 2 * size.bytes_of(given.target.numel() * size.page, case.dtype)
    for name, taken in (("score", read), ("compact", moved)):  # keys; read and written
        found[name]["gb_per_s"] = taken / found[name]["ms"] / 1e6
    return found
