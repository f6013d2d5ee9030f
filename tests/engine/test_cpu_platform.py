"""What the CPU platform sets before the engine's processes start, and what it refuses."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
import torch
from sglang.srt.server_args import ServerArgs

from tests.servers import sglang

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="where there is a GPU, SGLang's own platform serves"
)


def test_lora_is_refused_without_a_gpu(tiny_llama):
    """It started, and ended with the first request: "Found no NVIDIA driver"."""
    with pytest.raises(ValueError, match="LoRA"):
        ServerArgs(model_path=str(tiny_llama), device="cpu", enable_lora=True)


def test_threads_of_the_engine_sleep_soon(tiny_llama):
    """A thread that waited spun for 10 ms: with a core taken, 10 tokens a second became 0.35.

    What counts is what OpenMP read when the engine's processes loaded torch; it prints that.
    """
    arguments = ("--max-total-tokens", "4096")
    with sglang(tiny_llama, *arguments, OMP_DISPLAY_ENV="VERBOSE") as running:
        log = running.log.read_text()
    engine = log.split("server_args=", 1)[1]  # the HTTP server has loaded torch before
    found = re.findall(r"GOMP_SPINCOUNT = '(\d+)'", engine)
    assert len(found) >= 2  # scheduler and detokenizer
    assert set(found) == {"1000"}


def test_a_wait_policy_of_the_users_own_is_kept(tiny_llama, monkeypatch):
    """OpenMP would take the number before the policy."""
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    ServerArgs(model_path=str(tiny_llama), device="cpu")
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    ServerArgs(model_path=str(tiny_llama), device="cpu")
    assert "GOMP_SPINCOUNT" in os.environ


def test_a_penalty_waits_for_no_compiler():
    """The first request with one held everybody up for 14 seconds."""
    code = """
import torch
from sglang.srt.sampling.penaltylib.repetition_penalty import apply_scaling_penalties
from torch._dynamo.utils import counters
logits = torch.tensor([[1.0, -1.0]])
apply_scaling_penalties(logits, torch.tensor([[2.0, 2.0]]))
print(logits.tolist(), dict(counters["inductor"]))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[[0.5, -2.0]] {}"
