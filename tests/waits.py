"""Tests that nothing waits for the device, where there is none too."""

from __future__ import annotations

import contextlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sgl_kvc.cache.radix import CompressingRadixCache


@contextlib.contextmanager
def waiting_fails(*, on_gpu: bool):
    """Error where the host waits for the device, or on a CPU would wait were there one."""
    if not on_gpu:
        with Waits():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Waits(TorchDispatchMode):
    """Operations whose result, or its shape, the host has to ask the device for."""

    ASK = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        asks = any(name.strip("_").startswith(each.strip("_")) for each in self.ASK)
        asks |= name == "repeat_interleave" and kwargs.get("output_size") is None
        if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
            asks |= any(i is not None and i.dtype == torch.bool for i in args[1])
        if asks:
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **kwargs)


class UnwaitingCache(CompressingRadixCache):
    """Fails where compression would wait for the device; see `waiting_fails`."""

    @contextlib.contextmanager
    def behind_forward(self, *used):
        with super().behind_forward(*used), waiting_fails(on_gpu=self.pool.arena_k.is_cuda):
            yield
