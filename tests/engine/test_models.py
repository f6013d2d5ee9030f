"""Architectures, head layouts, cache types and block sizes; and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from kvc_server import launch

from tests import fork_server, tiny_models
from tests.engine.conftest import prompt
from tests.servers import assert_no_leak, sglang
from tests.sgl_kvc.test_support import MLA, edit


@pytest.mark.parametrize(
    ("model", "args"),
    [
        ({"architecture": "qwen2", "kv_heads": 8}, ("--dtype", "bfloat16", "--page-size", "8")),
        ({"architecture": "qwen3", "kv_heads": 1}, ("--dtype", "float16", "--page-size", "32")),
        ({}, ("--kv-cache-dtype", "fp8_e4m3", "--page-size", "16")),
    ],
    ids=["qwen2 MHA bf16 page 8", "qwen3 MQA fp16 page 32", "llama GQA fp8 page 16"],
)
def test_served_and_compressed(tmp_path, model, args):
    page = int(args[-1])
    folder = tiny_models.write(tmp_path, **model)
    mixed = ("--enable-mixed-chunk", "--chunked-prefill-size", "256", "--skip-tokenizer-init")
    with sglang(folder, *args, *mixed, "--max-total-tokens", "8192") as server:
        batch = [prompt(n, seed=n) for n in (700, 300, 650, 40)]
        for knob in ({"rate": 1}, {"rate": 8}):
            answers = server.generate(batch, knob, max_new_tokens=24, ignore_eos=True)
            assert [len(a["output_ids"]) for a in answers] == [24] * 4
            report = answers[0]["kv_compression"]
        whole, rest = divmod(700, page)
        segment = -(-whole // 8)
        assert report["blocks"]["after"] == segment + (1 if rest else 0)
        assert_no_leak(server)


@pytest.mark.parametrize(
    ("changes", "backends", "sentence"),
    [
        (MLA, ("--attention-backend", "kvc"),
         "multi-head latent attention (MLA) is not supported"),
        ({}, ("--attention-backend", "kvc", "--prefill-attention-backend", "torch_native"),
         "--prefill-attention-backend torch_native cannot be combined"),
        ({}, ("--attention-backend", "torch_native", "--decode-attention-backend", "kvc"),
         "give --attention-backend kvc"),
    ],
    ids=["MLA", "prefill elsewhere", "decode alone"],
)  # fmt: skip
def test_a_refused_server_stops_and_says_why(tmp_path, changes, backends, sentence):
    folder = edit(tiny_models.write(tmp_path / "model"), **changes)
    log = tmp_path / "log"
    program = launch.sglang(folder, *backends)
    with launch.started(program, log=log, popen=fork_server.popen) as server:
        assert server.process.wait(400) != 0
    said = [line for line in log.read_text().splitlines() if "sgl-kvc cannot serve" in line]
    assert said, log.read_text()[-3000:]
    assert sentence in said[0]


def refusal(tmp_path, script: str) -> str:
    """What a process says that registers the plugin after `script`, and ends."""
    log = tmp_path / "log"
    command = [sys.executable, "-c", f"{script}; from sgl_kvc.plugin import register; register()"]
    with log.open("wb") as out:
        process = fork_server.popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=dict(os.environ)
        )
    assert process.wait(400) != 0
    return log.read_text()


def test_another_sglang_is_refused_by_name(tmp_path):
    """As if 0.5.23 were installed: its metadata says so, nothing else is changed."""
    script = (
        "import importlib.metadata as m; real = m.version;"
        "m.version = lambda name: '0.5.23' if name == 'sglang' else real(name)"
    )
    said = "SGLang 0.5.23 is installed; sgl-kvc supports 0.5.17"
    assert said in refusal(tmp_path, script)


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("managers.schedule_batch", "ScheduleBatch", "prepare_for_extend"),  # hooked
        ("mem_cache.radix_cache", "RadixCache", "cache_finished_req"),  # overridden
        ("mem_cache.allocator", "PagedTokenToKVPoolAllocator", "alloc_extend"),  # abstract above
    ],
)
def test_a_missing_seam_is_refused_by_name(tmp_path, module, owner, name):
    """A rename upstream stops the process, with the name that is gone."""
    script = (
        f"from sglang.srt.{module} import {owner} as owner;"
        f"owner.renamed = owner.{name}; del owner.{name}"
    )
    said = f"SGLang has no sglang.srt.{module}.{owner}.{name}"
    assert said in refusal(tmp_path, script)
