"""Before all tests: kernels run on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.gateways import Gateway, serve

# Cores are shared with whatever else the machine does: how long an example takes says nothing.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

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


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    """SGLang's arguments set variables that servers of later files would start with."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def device() -> str:
    return DEVICE


@pytest.fixture
def kernels(device, monkeypatch) -> None:
    """FlashInfer on a GPU; its emulation elsewhere."""
    if device == "cpu":
        from tests.kernels.gpu import emulated

        emulated.install(monkeypatch)


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway and a worker with the embedded model, ready."""
    pool = ("--max-total-tokens", "16384", "--max-running-requests", "16")
    log = tmp_path_factory.mktemp("gateway") / "log"
    with serve(log, "--max-rate", "64", "--", *pool) as running:
        running.wait_ready()
        yield running
