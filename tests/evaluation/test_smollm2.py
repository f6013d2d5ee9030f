"""A small evaluation on the real language model, where it has been fetched (`make lm` does)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kvc_server.cli import main
from kvc_smollm2.fetch import fetched


@pytest.mark.skipif(fetched() is None, reason="SmolLM2 has not been fetched (make lm)")
def test_natural_text_tells_policies_apart(tmp_path: Path) -> None:
    assert main([
        "eval", "--embedded", "smollm2", "--out", str(tmp_path), "--length", "512", "--n", "4",
        "--tasks", "numbers", "names", "--policies", "kv-compress", "random", "--rates", "4",
    ]) == 0  # fmt: skip
    off, good, bad = json.loads((tmp_path / "results.json").read_text())["cells"]
    assert off["tokens_right"]["score"] >= 0.7
    assert good["tokens_right"]["score"] > bad["tokens_right"]["score"]
    assert good["lost"]["mean"] < bad["lost"]["mean"]
    assert good["kept"] == pytest.approx(bad["kept"], abs=1e-3)
    assert "Log-likelihood lost" in (tmp_path / "report.md").read_text()
