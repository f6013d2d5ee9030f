"""Hooks that are needed only where there is no GPU (SGLang 0.5.17)."""

from __future__ import annotations

from typing import Any

import torch

from sgl_kvc.compat.hook import Hook

_XGRAMMAR = "sglang.srt.constrained.xgrammar_backend"


def allocate_bitmask(vocab_size: int, batch_size: int) -> torch.Tensor:
    """``_allocate_token_bitmask``, in ordinary memory: int32 [batch_size, ceil(vocab_size / 32)].

    Every bit is set: all tokens are allowed.
    """
    import xgrammar

    return xgrammar.allocate_token_bitmask(batch_size, vocab_size)


def apply_bitmask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """``XGrammarGrammarBackend.apply_vocab_mask``: in `logits` [B, vocabulary], what a request's
    row of `vocab_mask` forbids becomes minus infinity.
    """
    import xgrammar

    xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)


def apply_bitmask_of_grammar(_grammar, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """``XGrammarGrammar.apply_vocab_mask``: the same, as a method."""
    apply_bitmask(logits, vocab_mask)


def profile(original, manager, request) -> Any:
    """``SchedulerProfilerManager._profile``: refuse the profilers that only a GPU has."""
    from sglang.srt.managers.io_struct import ProfileReqOutput

    unknown = sorted(set(request.activities or ()) - {"CPU", "GPU"})
    if unknown:
        message = f"activities {', '.join(unknown)} need a GPU; on this platform ask for CPU"
        return ProfileReqOutput(success=False, message=message)
    return original(manager, request)


HOOKS = (
    Hook(
        f"{_XGRAMMAR}._allocate_token_bitmask",
        "REPLACE",
        allocate_bitmask,
        "upstream pins the mask's memory without asking the platform, which needs a GPU driver",
        cpu=True,
    ),
    Hook(
        f"{_XGRAMMAR}.XGrammarGrammar.apply_vocab_mask",
        "REPLACE",
        apply_bitmask_of_grammar,
        "upstream masks logits on accelerators only; xgrammar itself has a CPU kernel",
        cpu=True,
    ),
    Hook(
        f"{_XGRAMMAR}.XGrammarGrammarBackend.apply_vocab_mask",
        "REPLACE",
        apply_bitmask,
        "the same for the masks of a reasoning parser",
        cpu=True,
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.profiler_manager"
        ".SchedulerProfilerManager._profile",
        "AROUND",
        profile,
        "upstream calls CUDA's profiler, which ends the scheduler",
        cpu=True,
    ),
)
