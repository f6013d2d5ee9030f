"""The hooks, and how a release line differs from another."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from types import SimpleNamespace

import pytest

from sgl_kvc.cache.request import Request
from sgl_kvc.compat.check import check_hooks
from sgl_kvc.compat.hook import Hook, IncompatibleError
from sgl_kvc.compat.pool import eager_while_compressed
from sgl_kvc.compat.releases import HOOKS, RELEASES, Release, release
from sgl_kvc.compat.uses import Uses
from sgl_kvc.spec import OFF


def test_hooked_functions_are_there():
    """Also those that only a GPU needs, or only a CPU."""
    assert any(hook.gpu for hook in HOOKS)
    assert any(hook.cpu for hook in HOOKS)
    assert any(uses.gpu for each in RELEASES for uses in each.all_symbols(gpu=True))
    for each in RELEASES:
        for gpu in (True, False):
            hooks = each.all_hooks(gpu=gpu)
            check_hooks(hooks)
            assert not any(hook.cpu if gpu else hook.gpu for hook in hooks)


def test_what_is_not_a_function_is_refused():
    hook = dataclasses.replace(HOOKS[0], target="sglang.srt.constants.GPU_MEMORY_TYPE_KV_CACHE")
    with pytest.raises(IncompatibleError, match="GPU_MEMORY_TYPE_KV_CACHE is not callable"):
        check_hooks([hook])


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("0.5.17", "0.5.17"),
        ("0.5.17.post1", "0.5.17"),
        ("0.5.17+cu130", "0.5.17"),
        ("0.5.23", "0.5.23"),
        ("0.5.17.1", None),
        ("0.5.170", None),
        ("0.5.1", None),
    ],
)
def test_the_installed_release_is_found(monkeypatch, version, line):
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: version)
    known = (Release("0.5.17"), Release("0.5.23"))
    if line is None:
        with pytest.raises(IncompatibleError, match=r"sgl-kvc supports 0\.5\.17, 0\.5\.23"):
            release(known)
    else:
        assert release(known).line == line


def test_a_release_is_a_row():
    """What 0.5.23 will need: something moved, gone, done by another function, or its own."""
    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    stream = "sglang.srt.managers.scheduler_components.output_streamer"
    support = "sglang.srt.utils.common.support_triton"
    new = Hook(f"{scheduler}.process_batch_result", "AFTER", print, "another way")
    row = Release(
        "0.5.23",
        moved={"sglang.srt.managers.scheduler": "sglang.srt.core", f"{scheduler}.__init__": "x.y"},
        gone=frozenset({support, "sglang.srt.mem_cache.common"}),
        hooks=(new,),
        symbols=(Uses("sglang.srt.server_args.ServerArgs", "new", "its own"),),
    )
    hooks = {hook.target: hook for hook in row.all_hooks(gpu=True)}
    assert len(hooks) == len([hook for hook in HOOKS if not hook.cpu]) - 1
    assert "x.y" in hooks
    assert hooks["sglang.srt.core.Scheduler.process_batch_result"].function is print
    assert not any(target.startswith(scheduler) for target in hooks)
    assert any(target.startswith(stream) for target in hooks)  # only begins alike
    assert support not in hooks
    symbols = {uses.owner: uses for uses in row.all_symbols(gpu=True)}
    assert "sglang.srt.mem_cache.common" not in symbols
    assert "sglang.srt.core.Scheduler" in symbols
    assert symbols["sglang.srt.server_args.ServerArgs"].names == "new"


def test_a_prefill_may_be_a_graph_if_nothing_in_it_is_compressed():
    plain, scored, reads = Request(OFF), Request(OFF), Request(OFF)
    scored.scores, reads.segment = object(), object()
    known = {"plain": plain, "scored": scored, "reads": reads}

    def may(rids: list[str] | None, *, pool: object, sglang: bool = True) -> bool:
        runner = SimpleNamespace(model_runner=SimpleNamespace(token_to_kv_pool=pool))
        batch = SimpleNamespace(rids=rids)
        return eager_while_compressed(lambda *_: sglang, runner, batch)

    ours = SimpleNamespace(requests=known)
    assert may(["plain", "unknown"], pool=ours)
    assert may(None, pool=ours)
    assert may(["plain"], pool=object())
    assert not may(["plain"], pool=ours, sglang=False)
    assert not may(["plain", "scored"], pool=ours)
    assert not may(["reads", "plain"], pool=ours)
