from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from sgl_kvc.pool.arena import ArenaKVPool
from tests.launches import Launches
from tests.sgl_kvc import fake_gpu, runners
from tests.sgl_kvc.test_cache import Lives


@pytest.fixture
def checked_lives() -> Iterator[Lives]:
    """The machine of `test_cache`, for its checks; they are made at the end too.

    Who asks for it has set SGLang's server arguments.
    """
    lives = Lives()
    lives.build()
    yield lives
    lives.accounting()
    lives.contents()
    lives.teardown()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """While it lasts CUDA tensors are fake; what would be launched on them."""
    with fake_gpu.fake_gpu(monkeypatch) as launches:
        yield launches


@pytest.fixture
def gpu_pool(gpu) -> ArenaKVPool:
    return fake_gpu.make_pool()


@pytest.fixture
def gpu_rows(gpu) -> SimpleNamespace:
    return fake_gpu.make_rows()


@pytest.fixture
def runner(device, kernels, tmp_path, monkeypatch) -> SimpleNamespace:
    """SGLang's model runner, whose rows 1 and 2 hold nothing yet; FlashInfer may be emulated."""
    return runners.make_runner(device, tmp_path, monkeypatch)
