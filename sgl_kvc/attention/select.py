"""Which attention runs: by the device, or as SGL_KVC_DECODE says (`--kvc-decode`)."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import torch
from kvc_kernels.dispatch import interpreted

from sgl_kvc.attention.support import UnsupportedError

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sgl_kvc.attention.base import KvcAttentionBackend

logger = logging.getLogger(__name__)

#: What ``--kvc-decode`` takes; it travels to SGLang's processes in this variable.
VARIABLE = "SGL_KVC_DECODE"
CHOICES = ("auto", "torch", "triton", "fa2", "xqa", "trtllm")

#: What measured fastest, by compute capability (bench.gpu, part bandwidth); Triton where nothing
#: is known. No GPU has been measured yet (docs/gpu.md).
FASTEST: dict[tuple[int, int], str] = {}


def create(model_runner: ModelRunner) -> KvcAttentionBackend:
    """The backend for this process.

    "auto" is torch on a CPU. On a GPU it decodes by what `FASTEST` says, and FlashInfer prefills
    where it can; "triton" has Triton do both.

    Raises
    ------
    UnsupportedError : for a choice that is none, or that cannot serve this model here.
    """
    chosen = os.environ.get(VARIABLE, "auto")
    if chosen not in CHOICES:
        raise UnsupportedError(f"{VARIABLE}={chosen}: must be one of {', '.join(CHOICES)}")
    on_gpu = model_runner.device == "cuda"
    if chosen == "auto" and not on_gpu:
        chosen = "triton" if interpreted() else "torch"
    kernels = None if chosen == "triton" else chosen
    if chosen == "auto":
        kernels = FASTEST.get(torch.cuda.get_device_capability())
    logger.info("attention over segment and tail runs in %s", kernels or "triton")
    if chosen == "torch":
        from sgl_kvc.attention.torch_backend import TorchAttentionBackend

        return TorchAttentionBackend(model_runner)
    if chosen == "triton":
        from sgl_kvc.attention.triton_backend import TritonAttentionBackend

        return TritonAttentionBackend(model_runner)
    if not on_gpu:
        raise UnsupportedError(f"--kvc-decode {chosen} needs a GPU")
    from sgl_kvc.attention.flashinfer_backend import FlashInferAttentionBackend

    return FlashInferAttentionBackend(model_runner, kernels)
