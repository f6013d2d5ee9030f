"""The numbers of a report, as docs/http.md says them."""

from __future__ import annotations

import dataclasses
import json

import torch

from sgl_kvc.pool.host_copy import HostCopy
from sgl_kvc.report import BlockSize, Kept, Report

BLOCK = BlockSize(tokens=16, bytes=1000)


def compressed(**changes) -> Report:
    """Of 100 tokens: 16 are shared, four blocks are compressed to one, the tail is 20 tokens."""
    kept = Kept(36, 52, HostCopy(torch.tensor([0, 3])))
    report = Report(100, BLOCK, kept, before=7, own=3, shared=1, policy="snapkv", rate=4.0)
    return dataclasses.replace(report, **changes)


def test_an_uncompressed_request_holds_its_whole_prompt():
    for tokens, blocks in ((0, 0), (1, 1), (16, 1), (17, 2), (100, 7)):
        report = Report.uncompressed(tokens, BLOCK).to_json()
        assert report == {
            "policy": None,
            "rate": 1.0,
            "rate_achieved": 1.0,
            "prompt_tokens": tokens,
            "kept_per_head": {"mean": float(tokens), "min": tokens, "max": tokens},
            "blocks": {"before": blocks, "after": blocks, "shared": 0},
            "bytes": {"before": blocks * 1000, "after": blocks * 1000, "shared": 0},
            "skipped": None,
        }
    assert Report.uncompressed(5, BLOCK, "too short").to_json()["skipped"] == "too short"


def test_a_compressed_request():
    report = compressed().to_json()
    assert report == {
        "policy": "snapkv",
        "rate": 4.0,
        "rate_achieved": 1.923,  # 100 / 52
        "prompt_tokens": 100,
        "kept_per_head": {"mean": 52.0, "min": 36, "max": 36 + 3 * 16},
        "blocks": {"before": 7, "after": 3, "shared": 1},
        "bytes": {"before": 7000, "after": 3000, "shared": 1000},
        "skipped": None,
    }
    assert isinstance(report["kept_per_head"]["mean"], float)
    assert json.loads(json.dumps(report)) == report
    assert compressed(rate=None).to_json()["rate"] is None
    assert "decode" not in report


def test_heads_that_all_keep_the_same():
    assert Kept(36, 52).to_json(16) == {"mean": 52.0, "min": 52, "max": 52}


def test_what_decode_compressed_again():
    report = compressed(recompressed=0)
    assert report.to_json()["decode"] == {"recompressed": 0, "kept_per_head_peak": 0}
    report.note_peak(70)
    report.note_peak(60)
    assert report.to_json()["decode"] == {"recompressed": 0, "kept_per_head_peak": 70}
    report.recompressed += 1
    report.note_peak(80)
    assert report.to_json()["decode"] == {"recompressed": 1, "kept_per_head_peak": 80}


def test_a_peak_says_that_compression_was_to_go_on():
    report = compressed()
    report.note_peak(70)
    assert report.to_json()["decode"] == {"recompressed": 0, "kept_per_head_peak": 70}
