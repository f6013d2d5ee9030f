"""Policies by the names of their papers: what they promise, and what they do in decode."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_kvc.spec import PRESETS, SpecError, catalogue, parse


@pytest.mark.parametrize("name", [n for n, preset in PRESETS.items() if "arXiv" in preset.source])
def test_names_that_promise_a_paper_say_how_they_differ(name):
    """In a line or two; what they say of decode is what the policy can do."""
    differs, continual = PRESETS[name].differs, parse({"rate": 8, "policy": name}).continual
    assert differs, "no preset here does all that its paper does"
    assert differs.endswith(".")
    assert "\n" not in differs
    assert len(differs) <= 300
    if "recompress_every" in differs:
        assert continual is not None
    if "Compresses once" in differs:
        assert continual is None


def test_only_the_baseline_has_no_paper():
    assert [name for name, preset in PRESETS.items() if not preset.differs] == ["random"]


def test_the_presets_of_kv_compress_are_the_papers():
    """As its authors' README runs them: KVC-w with w = 8, KVC-full."""
    paper = parse({"rate": 8, "policy": "kvc-paper"})
    assert (paper.scorer, paper.apportioner) == ("attention-window", "global")
    wanted = {"window": 8, "pool": 7, "pooling": "max", "norm": "l2", "group": "sum"}
    assert paper.parameters == wanted | {"half_life": 0, "profile_reach": 1, "profile_power": 0}
    assert (paper.sinks, paper.recent) == (0, 8)
    full = parse({"rate": 8, "policy": "kvc-full"})
    assert full.parameters["excluded"] == 10
    assert full.parameters["profile_power"] == 0
    assert (full.sinks, full.recent) == (0, 32)


@pytest.mark.parametrize(
    ("knob", "by"),
    [
        ({"policy": "kv-compress"}, "squared attention"),
        ({"policy": "kvc-full"}, "squared attention"),
        ({"policy": "snapkv"}, "attention"),
        ({"policy": "h2o"}, "attention"),
        ({"policy": "virtual-repeat"}, "squared attention"),
        ({"question_tokens": 20}, "squared attention"),
        ({"policy": "h2o", "norm": "l2"}, "squared attention"),
        ({"policy": "streaming-llm"}, "position"),
        ({"scorer": "recency", "apportioner": "global"}, "position"),
        ({"policy": "r-kv"}, "rescored"),
        ({"policy": "ada-kv"}, None),
        ({"policy": "tova"}, None),
    ],
)
def test_how_compression_goes_on_in_decode(knob, by):
    assert parse(knob | {"rate": 8}).continual == by
    if by is not None:
        assert parse(knob | {"rate": 8, "recompress_every": 64}).recompress_every == 64
        return
    with pytest.raises(SpecError, match=r"cannot go on during decode; .* can"):
        parse(knob | {"rate": 8, "recompress_every": 64})


@pytest.mark.parametrize(
    ("family", "word"), [("scorers", '"attentoin"'), ("scorers", "True"), ("apportioners", '"x"')]
)
def test_a_method_that_says_nonsense_of_decode_is_refused(family, word, tmp_path: Path):
    file = tmp_path / "mine.py"
    function = catalogue.FAMILIES[family]
    file.write_text(f"CONTINUAL = {word}\n\n\ndef {function}(context): ...\n")
    with pytest.raises(ValueError, match=r"mine\.py: CONTINUAL is"):
        catalogue._read(family, file)
