"""Which attention is chosen, by the device and by what `--kvc-decode` asks for."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from sgl_kvc.attention import backend, select
from sgl_kvc.attention.select import CHOICES, VARIABLE, create
from sgl_kvc.attention.support import UnsupportedError


class Made:
    """A backend that knows what it was made of: a whole one needs a model and its kernels."""

    def __init__(self, runner, kernels: object = "own"):
        self.runner, self.kernels = runner, kernels


@pytest.fixture
def chosen(monkeypatch):
    """Of (asked, device, interpreter, fastest): the runner it got and the kernels it decodes by."""
    stub = ModuleType("flashinfer_backend")
    stub.FlashInferAttentionBackend = Made
    monkeypatch.setitem(sys.modules, "sgl_kvc.attention.flashinfer_backend", stub)
    monkeypatch.setattr(backend, "KvcAttentionBackend", Made)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))

    ready = []
    monkeypatch.setattr(select, "_warm_up", lambda *made: ready.append(made))

    def choose(asked: str | None, device: str, interpreter: bool = False, fastest: str = ""):
        monkeypatch.delenv(VARIABLE, raising=False)
        if asked is not None:
            monkeypatch.setenv(VARIABLE, asked)
        monkeypatch.setattr(select, "interpreted", lambda: interpreter)
        monkeypatch.setattr(select, "FASTEST", {(9, 0): fastest} if fastest else {})
        runner = SimpleNamespace(device=device)
        ready.clear()
        made = create(runner)
        assert made.runner is runner
        assert ready == ([(made, runner)] if device == "cuda" else [])
        return made.kernels

    return choose


@pytest.mark.parametrize("asked", [None, "auto"])
def test_auto(chosen, asked):
    assert chosen(asked, "cpu") == "own"
    assert chosen(asked, "cpu", interpreter=True) == "own"
    assert chosen(asked, "cuda") is None, "FlashInfer prefills, Triton decodes"
    assert chosen(asked, "cuda", fastest="xqa") == "xqa"
    assert chosen(asked, "cuda", fastest="triton") is None


def test_what_is_asked_for(chosen):
    assert chosen("torch", "cpu") == "own"
    assert chosen("triton", "cpu", interpreter=True) == "own"
    assert chosen("triton", "cuda", fastest="xqa") == "own"
    for kernels in ("fa2", "xqa", "trtllm"):
        assert chosen(kernels, "cuda", fastest="triton") == kernels


@pytest.mark.parametrize(
    ("asked", "device", "interpreter", "sentence"),
    [
        ("torch", "cuda", False, "--kvc-decode torch needs a CPU"),
        ("fa2", "cpu", False, "--kvc-decode fa2 needs a GPU$"),
        ("trtllm", "cpu", True, "--kvc-decode trtllm needs a GPU$"),
        ("triton", "cpu", False, "--kvc-decode triton needs a GPU, or Triton's interpreter"),
        ("AUTO", "cpu", False, f"{VARIABLE}=AUTO: must be one of {', '.join(CHOICES)}"),
        ("", "cuda", False, f"{VARIABLE}=: must be one of auto, torch, triton, fa2, xqa, trtllm"),
    ],
)
def test_what_cannot_be(chosen, asked, device, interpreter, sentence):
    with pytest.raises(UnsupportedError, match=sentence):
        chosen(asked, device, interpreter)
