"""Before all tests: kernels run on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib
import os
import pkgutil

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    # Triton's own functions become what the variable says when they are imported, and kernels
    # when they are defined. Then it goes, so that servers of other tests do not see it.
    os.environ["TRITON_INTERPRET"] = "1"
    import kvc_kernels.gpu
    import triton.experimental.gluon
    import triton.language  # noqa: F401

    for _module in pkgutil.iter_modules(kvc_kernels.gpu.__path__, "kvc_kernels.gpu."):
        importlib.import_module(_module.name)
    del os.environ["TRITON_INTERPRET"]


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def kernels(device, monkeypatch) -> None:
    """FlashInfer on a GPU; its emulation elsewhere."""
    if device == "cpu":
        from tests.kernels.gpu import emulated

        emulated.install(monkeypatch)
