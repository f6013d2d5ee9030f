"""Which of two implementations an operation takes: Triton on a GPU, torch elsewhere."""

from __future__ import annotations

import os

import torch


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is on a GPU, or Triton's interpreter is asked for (TRITON_INTERPRET=1)."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
