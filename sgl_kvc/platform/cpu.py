"""SGLang on a CPU, without ``sgl_kernel``.

SGLang's in-tree CPU platform needs AMX kernels. As an out-of-tree platform, models run
their ``forward_native`` path and this class names the pool and the allocator.
"""

from __future__ import annotations

import os

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

#: Below this width a layer's matrices are too small to share between threads: handing them
#: over costs more than it saves, and far more when other processes want the cores.
_ONE_THREAD_BELOW = 512

#: How often an idle thread of torch's OpenMP (libgomp) looks for work before it sleeps. libgomp's
#: own 300,000 (some 10 ms) hold a core that the thread with the work waits for as soon as another
#: process runs: with one core taken, SmolLM2-135M's layers ran 8 to 21 times slower for it
#: (docs/design.md).
_SPIN_COUNT = "1000"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """An out-of-tree platform whose device is the CPU."""

    _enum = PlatformEnum.OOT
    device_type = "cpu"

    def apply_server_args_defaults(self, server_args) -> None:
        """Defaults a CPU needs; nothing the user set is changed.

        Raises ValueError for what would end the scheduler with the first request.
        """
        if server_args.enable_lora or server_args.lora_paths:
            raise ValueError("--enable-lora and --lora-paths need a GPU: SGLang pins LoRA's memory")
        if server_args.dtype == "auto":
            server_args.dtype = "float32"  # half precision is emulated on most CPUs
        server_args.sleep_on_idle = True  # the scheduler would spin on a core others need
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"
        if server_args.get_model_config().hf_text_config.hidden_size < _ONE_THREAD_BELOW:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # the scheduler process inherits it
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ.setdefault("GOMP_SPINCOUNT", _SPIN_COUNT)  # read when torch is loaded
        # SGLang lets ranks talk by NCCL where it finds the library, which comes with torch.
        os.environ.setdefault("SGLANG_NCCL_SO_PATH", "there is no GPU")

    def get_device(self, device_id: int = 0) -> str:
        return "cpu"  # 0.5.17 splits the name as a string

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"  # inductor takes 14 s for a penalty, and nothing else is served meanwhile

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        """The arena when our attention backend serves, SGLang's own pool otherwise."""
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        from sgl_kvc.compat import serving_with_kvc
        from sgl_kvc.pool.arena import ArenaKVPool

        return ArenaKVPool if serving_with_kvc() else MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from sgl_kvc.platform.allocator import TorchPagedAllocator

        return TorchPagedAllocator
