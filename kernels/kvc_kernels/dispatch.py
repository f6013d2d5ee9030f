"""Which of two implementations an operation takes: Triton on a GPU, torch elsewhere."""

from __future__ import annotations

import os

import torch


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is on a GPU, or Triton's interpreter is to stand in for one."""
    return tensor.is_cuda or interpreted()


def interpreted() -> bool:
    """Whether Triton's interpreter is asked for, as Triton is: TRITON_INTERPRET=1."""
    return os.environ.get("TRITON_INTERPRET") == "1"
