"""Kernels run on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib
import os
import pkgutil

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":  # Triton reads it when kernels are defined; servers of other tests must not
    os.environ["TRITON_INTERPRET"] = "1"
import kvc_kernels.gpu  # noqa: E402

for _module in pkgutil.iter_modules(kvc_kernels.gpu.__path__, "kvc_kernels.gpu."):
    importlib.import_module(_module.name)
os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture
def device() -> str:
    return DEVICE


