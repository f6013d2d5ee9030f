"""Which requests may read each other's segments."""

from __future__ import annotations

from sgl_kvc.spec import parse


def test_what_shapes_a_segment():
    """All of the knob but what is about the prompt, or about when and whether."""
    same = ({"min_tokens": 1}, {"prefix_tokens": 9}, {"question_tokens": 9}, {"force": True},
            {"question": "last_message"}, {"policy": "kv-compress"}, {"hold_s": 9},
            {"reuse": "both"}, {"explain": True})  # fmt: skip
    other = ({"rate": 9}, {"sinks": 5}, {"recent": 9}, {"pool": 3}, {"policy": "snapkv"},
             {"scorer": "attention-window", "apportioner": "uniform"})  # fmt: skip
    knob = {"rate": 8, "policy": "kv-compress"}
    shape = parse(knob).shape
    assert all(parse(knob | each).shape == shape for each in same)
    for each in other:
        given = (knob if "scorer" not in each else {"rate": 8}) | each
        assert parse(given).shape != shape, each
    assert parse({"budget": 64}).shape != parse({"budget": 64, "max_rate": 4}).shape
    assert len({shape, parse({"budget": 64}).shape}) == 2, "it can be a key"
