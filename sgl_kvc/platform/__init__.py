"""The CPU platform, so that SGLang serves on machines without an accelerator.

SGLang imports this module while it is still importing itself: nothing of SGLang may be
imported here at module level.
"""

from __future__ import annotations


def activate() -> str | None:
    """Entry point ``sglang.srt.platforms``: the platform class's path, or None to stay out.

    Stays out wherever PyTorch sees an accelerator: there SGLang's own platform serves.
    """
    import torch

    if torch.cuda.is_available() or torch.xpu.is_available():
        return None
    return "sgl_kvc.platform.cpu.CpuPlatform"
