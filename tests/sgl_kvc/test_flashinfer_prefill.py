"""The backend that hands prefill to FlashInfer does what the one in Triton does.

Without a GPU FlashInfer is emulated (tests/kernels/gpu/emulated.py) and Triton interpreted.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kvc_kernels.gpu import flashinfer_prefill
from kvc_kernels.gpu.flashinfer_prefill import PagedPrefill
from kvc_kernels.gpu.flashinfer_segments import PagedSegments
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sgl_kvc.attention.backend import KvcAttentionBackend
from sgl_kvc.attention.flashinfer_backend import FlashInferAttentionBackend
from sgl_kvc.policy.scores import PromptScores
from sgl_kvc.spec import Extent, parse
from tests.sgl_kvc.runners import (
    GROUP,
    HEADS,
    LAYER,
    LAYERS,
    PAGE,
    answer,
    batch,
    compress,
    request_in,
)

PREFILL = {"from nothing": {1: (0, 21), 2: (0, 1)}, "chunks": {2: (33, 9), 1: (16, 40)}}


@pytest.mark.parametrize("lens", PREFILL.values(), ids=PREFILL)
def test_prefill(runner, lens):
    expected = answer(KvcAttentionBackend(runner), ForwardMode.EXTEND, lens)
    backend = FlashInferAttentionBackend(runner, None)
    got = answer(backend, ForwardMode.EXTEND, lens)
    assert backend._prefill is not None
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)


MIXED = {
    "beside a prompt": {1: (70, 9), 2: (0, 5)},
    "beside a prefix": {2: (33, 9), 1: (64, 21)},
    "alone": {1: (64, 1)},
}


@pytest.mark.parametrize("many", [1, 30])
@pytest.mark.parametrize("lens", MIXED.values(), ids=MIXED)
def test_a_compressed_context_beside_others(runner, lens, many, monkeypatch):
    """Of the others FlashInfer reads the prefix; of this one it does, if there are many tokens."""
    monkeypatch.setattr(flashinfer_prefill, "_MANY", many)
    reference = KvcAttentionBackend(runner)
    compress(reference, 1)
    expected = answer(reference, ForwardMode.EXTEND, lens)
    backend = FlashInferAttentionBackend(runner, None)
    compress(backend, 1)
    got = answer(backend, ForwardMode.EXTEND, lens)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
    planned = backend._prefill
    assert (planned is None) == (many > 1 and len(lens) == 1)
    assert planned is None or planned.reads_segments == (many == 1)


def test_a_request_that_nobody_knows_could_be_compressed(runner):
    lens = PREFILL["chunks"]
    expected = answer(KvcAttentionBackend(runner), ForwardMode.EXTEND, lens)
    backend = FlashInferAttentionBackend(runner, None)
    backend.requests = lambda forward_batch: [request_in(backend, 2), None]
    got = answer(backend, ForwardMode.EXTEND, lens)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
    assert backend._prefill._by_triton.tolist() == [1]
    backend.requests = lambda forward_batch: []
    assert torch.equal(answer(backend, ForwardMode.EXTEND, lens), expected)
    assert backend._prefill is None


def test_layers_of_a_graph_are_given_another_batch(runner):
    """As `PrefillCudaGraphRunner.load_batch` makes it: of the same tensors, without names."""
    backend = FlashInferAttentionBackend(runner, None)
    given = batch(backend, ForwardMode.EXTEND, PREFILL["chunks"])
    backend.init_forward_metadata(given)
    static = SimpleNamespace(**vars(given) | {"rids": None})
    assert backend._of(static) is backend._of(given)
    assert [each.row for each in backend._of(static).requests] == [2, 1]


def test_prompts_are_scored_by_what_flashinfer_tells(runner):
    """The log-sum-exp from either kernel gives the same scores."""
    scores, spec = [], parse({"rate": 2, "min_tokens": 0, "policy": "snapkv"})
    for backend in (KvcAttentionBackend(runner), FlashInferAttentionBackend(runner, None)):
        extent, request = Extent.of(spec, 60, PAGE), request_in(backend, 2)
        request.scores = PromptScores(
            spec, extent, list(range(60)), PAGE, LAYERS, backend.pool.facts
        )
        for begin, end in ((0, 32), (32, 60)):
            answer(backend, ForwardMode.EXTEND, {1: (0, 3), 2: (begin, end - begin)})
        scores.append(request.scores._scores[LAYER])
    torch.testing.assert_close(*scores, atol=2e-3, rtol=2e-3)
    assert scores[0].shape == (HEADS, 60)
    assert scores[0].sum() == pytest.approx(32 * HEADS * GROUP, rel=0.2)  # of 32 queries


@pytest.mark.parametrize("how", ["wrong", "not there"])
def test_where_flashinfer_cannot_prefill_triton_does(runner, how, monkeypatch, caplog):
    def broken(self, *args, **kwargs):
        if how == "not there":
            raise RuntimeError("nvcc is not there")
        out, lse = real(self, *args, **kwargs)
        return 1.1 * out, lse

    real = PagedPrefill.run
    monkeypatch.setattr(PagedPrefill, "run", broken)
    backend = FlashInferAttentionBackend(runner, None)
    said = "nvcc is not there" if how == "not there" else "not close"
    assert "Triton prefills, not FlashInfer: " in caplog.text
    assert said in caplog.text
    lens = PREFILL["chunks"]
    expected = answer(KvcAttentionBackend(runner), ForwardMode.EXTEND, lens)
    assert torch.equal(answer(backend, ForwardMode.EXTEND, lens), expected)


def test_where_flashinfer_cannot_read_segments_triton_does(runner, monkeypatch, caplog):
    def wrong(self, *args):
        out, lse = real(self, *args)
        return out, lse + 1

    real = PagedSegments.run
    monkeypatch.setattr(PagedSegments, "run", wrong)
    monkeypatch.setattr(flashinfer_prefill, "_MANY", 1)
    backend = FlashInferAttentionBackend(runner, None)
    assert "Triton reads compressed contexts, not FlashInfer: AssertionError" in caplog.text
    lens = MIXED["beside a prompt"]
    reference = KvcAttentionBackend(runner)
    compress(reference, 1)
    expected = answer(reference, ForwardMode.EXTEND, lens)
    compress(backend, 1)
    got = answer(backend, ForwardMode.EXTEND, lens)
    torch.testing.assert_close(got, expected, atol=2e-3, rtol=2e-3)
    assert backend._prefill is not None


def test_a_model_of_32_bits_is_prefilled_by_triton(runner, caplog):
    runner.dtype = torch.float32
    assert FlashInferAttentionBackend(runner, None)._prefills is None
    assert "16-bit floats" in caplog.text
