"""Which attention serves: by the device, or as SGL_KVC_DECODE says (`--kvc-decode`)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from kvc_kernels.dispatch import interpreted

from sgl_kvc.attention.support import UnsupportedError

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sgl_kvc.attention.backend import KvcAttentionBackend

logger = logging.getLogger(__name__)

#: `--kvc-decode` travels to SGLang's processes in this variable.
VARIABLE = "SGL_KVC_DECODE"

#: The fastest decode kernel measured, by compute capability (bench.gpu, part bandwidth); Triton
#: where nothing is known. No GPU has been measured yet (docs/gpu.md).
FASTEST: dict[tuple[int, int], str] = {}


def decode_kernel() -> str:
    """What decodes on this GPU: what `--kvc-decode` asks for, or by "auto" the fastest known."""
    chosen = os.environ.get(VARIABLE, "auto")
    if chosen != "auto":
        return chosen
    return FASTEST.get(torch.cuda.get_device_capability(), "triton")


def _own(model_runner: ModelRunner, _decode: str) -> KvcAttentionBackend:
    """Our kernels alone: torch's on a CPU, Triton's on a GPU or in its interpreter."""
    from sgl_kvc.attention.backend import KvcAttentionBackend

    return KvcAttentionBackend(model_runner)


def _flashinfer(model_runner: ModelRunner, decode: str) -> KvcAttentionBackend:
    """FlashInfer for prefill, and for decode where that is not "triton"."""
    from sgl_kvc.attention.flashinfer_backend import FlashInferAttentionBackend

    return FlashInferAttentionBackend(model_runner, None if decode == "triton" else decode)


#: By name what `--kvc-decode` may ask for, and where it runs.
_BACKENDS: dict[str, tuple[Callable[[ModelRunner, str], KvcAttentionBackend], str]] = {
    "torch": (_own, "cpu"),
    "triton": (_own, "any"),
    "fa2": (_flashinfer, "gpu"),
    "xqa": (_flashinfer, "gpu"),
    "trtllm": (_flashinfer, "gpu"),
}
CHOICES = ("auto", *_BACKENDS)


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
    if chosen != "auto":
        decode, (make, where) = chosen, _BACKENDS[chosen]
    elif on_gpu:
        decode = decode_kernel()
        make, where = _flashinfer, "gpu"
    else:
        decode = "triton" if interpreted() else "torch"
        make, where = _BACKENDS[decode]
    if where not in ("any", "gpu" if on_gpu else "cpu"):
        needs = "a GPU" if where == "gpu" else "a CPU"
        raise UnsupportedError(f"--kvc-decode {chosen} needs {needs}")
    if decode == "triton" and not on_gpu and not interpreted():
        raise UnsupportedError("--kvc-decode triton needs a GPU, or Triton's interpreter")
    logger.info("decode kernel over the spans of the KV cache: %s", decode)
    backend = make(model_runner, decode)
    if on_gpu:
        _warm_up(backend, model_runner)
    return backend


def _warm_up(backend: KvcAttentionBackend, model_runner: ModelRunner) -> None:
    from sglang.srt.layers.radix_attention import RadixAttention

    from sgl_kvc.attention.warm_up import warm_up

    layers = (x for x in model_runner.model.modules() if isinstance(x, RadixAttention))
    layer = next(layers)
    warm_up(backend.pool, layer.tp_q_head_num, model_runner.dtype, layer.scaling)
