"""Which part of a prompt is compressed: by hand, and whatever the knob."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvc.spec import Extent, SpecError, parse

knobs = st.fixed_dictionaries(
    {},
    optional={
        "prefix_tokens": st.integers(0, 500),
        "question_tokens": st.integers(0, 500),
        "min_tokens": st.integers(0, 300),
        "recompress_every": st.sampled_from([0, 1, 64]),
        "window": st.integers(1, 100),
    },
)
sizes = st.one_of(
    st.builds(lambda rate: {"rate": rate}, st.sampled_from([1, 1.01, 2, 8, 1024])),
    st.builds(lambda budget: {"budget": budget}, st.integers(1, 700)),
)


@given(knobs, sizes, st.integers(0, 900), st.sampled_from([1, 8, 16, 64]))
def test_extents_hold_together(knob, size, prompt, page):
    spec = parse(knob | size)
    extent = Extent.of(spec, prompt, page)
    assert 0 <= extent.begin <= extent.end <= prompt
    assert extent.begin % page == extent.end % page == 0
    assert extent.begin <= spec.prefix_tokens
    assert extent.end <= max(0, prompt - spec.question_tokens)
    blocks = (extent.end - extent.begin) // page
    assert min(1, blocks) <= extent.segment_blocks <= blocks
    assert 0 <= extent.match_limit <= extent.match_limit_with_states <= prompt
    if extent.compressed:
        assert extent.skipped is None
        assert extent.segment_blocks < blocks or spec.recompress_every
        wanted = size.get("budget", blocks * page / size.get("rate", 1))
        assert extent.segment_blocks == min(blocks, max(1, math.ceil(wanted / page)))
        assert blocks or extent.scored == extent.end, "there is nothing to score"
        assert extent.match_limit_with_states == max(0, extent.scored - spec.window)
        assert extent.match_limit == (0 if spec.all_queries else extent.match_limit_with_states)
    else:
        assert (extent.skipped is None) == spec.off
        assert extent.match_limit == prompt
        assert extent.tail_blocks(prompt) * page >= prompt


def test_a_plain_prompt():
    extent = Extent.of(parse({"rate": 8}), 1000, 16)
    assert (extent.begin, extent.end, extent.scored) == (0, 992, 1000)
    assert extent.segment_blocks == 8  # 62 whole blocks / 8
    assert extent.match_limit == 1000 - 32
    assert extent.tail_blocks(1000 + 200) == 13  # 8 + 200 tokens
    assert extent.tail_blocks(1000 + 201) == 14
    assert extent.compressed


def test_a_prefix_is_kept_whole():
    """Only what follows its whole blocks is compressed, and by the same rate."""
    extent = Extent.of(parse({"rate": 2, "prefix_tokens": 900}), 1300, 16)
    assert (extent.begin, extent.end) == (896, 1296)
    assert extent.segment_blocks == 13  # 25 / 2
    assert extent.match_limit == 1300 - 32, "the prefix may come from the cache"
    budget = Extent.of(parse({"budget": 64, "prefix_tokens": 900}), 1300, 16)
    assert budget.segment_blocks == 4, "the prefix does not count against the budget"


def test_a_question_ends_what_is_scored():
    knob = {"rate": 4, "question_tokens": 20, "policy": "kv-compress"}
    extent = Extent.of(parse(knob), 1000, 16)
    assert (extent.end, extent.scored) == (976, 976)
    assert extent.match_limit == 976 - 32


def test_a_scorer_of_all_queries_matches_nothing_unless_remembered():
    extent = Extent.of(parse({"rate": 4, "policy": "h2o"}), 1000, 16)
    assert extent.match_limit == 0
    assert extent.match_limit_with_states == 999


@pytest.mark.parametrize(
    ("knob", "prompt", "reason"),
    [
        ({"rate": 8}, 63, "the prompt's 63 tokens are fewer than min_tokens (64)"),
        ({"budget": 999}, 1000, "nothing to remove: the prompt fills 62 whole blocks of 16 tokens"),
        ({"rate": 8, "min_tokens": 0}, 31,
         "nothing to remove: the prompt fills 1 whole blocks of 16 tokens"),
        ({"rate": 8, "question_tokens": 90}, 100,
         "nothing to remove: what comes before the question fills 0 whole blocks of 16 tokens"),
        ({"rate": 8, "prefix_tokens": 80}, 100,
         "nothing to remove: what follows prefix_tokens fills 1 whole blocks of 16 tokens"),
        ({"rate": 8, "prefix_tokens": 70, "question_tokens": 50}, 100,
         "nothing to remove: what lies between prefix_tokens and the question fills 0 whole "
         "blocks of 16 tokens"),
        ({"rate": 8, "prefix_tokens": 1, "min_tokens": 0}, 31,
         "nothing to remove: what follows prefix_tokens fills 1 whole blocks of 16 tokens"),
        ({"rate": 8, "question_tokens": 1, "min_tokens": 0}, 31,
         "nothing to remove: what comes before the question fills 1 whole blocks of 16 tokens"),
        ({"rate": 8, "prefix_tokens": 1 << 24}, 100,
         "nothing to remove: what follows prefix_tokens fills 0 whole blocks of 16 tokens"),
    ],
)  # fmt: skip
def test_why_not(knob, prompt, reason):
    extent = Extent.of(parse(knob), prompt, 16)
    assert extent.skipped == reason
    assert not extent.compressed


def test_a_prompt_of_min_tokens_is_compressed():
    assert Extent.of(parse({"rate": 8, "min_tokens": 64}), 64, 16).compressed


def test_off_is_no_reason():
    extent = Extent.of(parse(None), 1000, 16, unable="there is no memory")
    assert (extent.skipped, extent.compressed) == (None, False)


def test_the_engines_reason_wins():
    for tokens in (10, 1000):
        extent = Extent.of(parse({"rate": 8}), tokens, 16, unable="there is no memory")
        assert (extent.skipped, extent.compressed) == ("there is no memory", False)


def test_compression_in_decode_gives_a_prompt_its_own_blocks_first():
    extent = Extent.of(parse({"budget": 999, "recompress_every": 8}), 40, 16)
    assert extent.compressed
    assert extent.segment_blocks == 2


def test_nothing_is_compressed_before_decode_where_a_prefix_takes_the_whole_prompt():
    extent = Extent.of(parse({"rate": 8, "prefix_tokens": 1 << 24, "recompress_every": 8}), 100, 16)
    assert extent.compressed
    assert (extent.begin, extent.end, extent.segment_blocks) == (96, 96, 0)


def test_an_error_keeps_its_problem():
    with pytest.raises(SpecError) as caught:
        parse({"rate": 0.5})
    error = caught.value
    assert (error.name, error.field) == ("rate", "kv_compression.rate")
    assert error.problem == "must be at least 1, which means off (got 0.5)"
    assert str(error) == f"{error.field}: {error.problem}"
    assert error.at("custom_params.kv_compression") == "custom_params.kv_compression.rate"
    with pytest.raises(SpecError) as caught:
        parse([])
    assert caught.value.at("here") == "here"


@given(
    sizes, st.integers(0, 900), st.sampled_from([8, 16, 64]), st.integers(1, 300),
    st.sampled_from([0, 0, 40]), st.sampled_from([0, 0, 30]),
)  # fmt: skip
def test_a_bounded_prefill_stops_before_it_holds_more(size, prompt, page, block, prefix, question):
    knob = {"prefill_block": block, "prefix_tokens": prefix, "question_tokens": question}
    extent = Extent.of(parse(size | knob | {"window": 1}), prompt, page)
    if not extent.compressed:
        assert extent.prefill_block == 0
        return
    assert extent.prefill_block == -(-block // page) * page
    assert extent.match_limit == extent.match_limit_with_states <= extent.begin
    done = held = most = 0
    kept = extent.begin + extent.segment_blocks * page
    while (cut := extent.next_cut(done)) is not None:
        assert done < cut <= extent.end
        assert cut % page == 0
        held, done = held + cut - done, cut
        most = max(most, held)
        if cut > extent.begin:
            assert held > kept, "there is something to remove"
            held = kept
    if extent.begin < done < extent.end:
        assert extent.end - done == extent.prefill_block, "the last block is as long as the others"
    most = max(most, held + prompt - done)
    assert most <= extent.bound * page
    assert extent.bound * page <= kept + max(extent.prefill_block, question) + 2 * page


@pytest.mark.parametrize(
    ("knob", "told"),
    [
        ({"recompress_every": 8}, "recompress_every"),
        ({"explain": True}, "explain"),
        ({"rate": None, "on_pressure": 4}, "on_pressure"),
        ({"reuse": "both", "policy": "kv-compress"}, "turns"),
        ({"policy": "r-kv"}, "scorer r-kv needs the whole prompt"),
        ({"policy": "keyformer"}, "attention-window"),
        ({"policy": "ada-kv"}, "apportioner adaptive"),
        ({"policy": "kv-compress", "window": 64}, "at least the window"),
    ],
)
def test_what_does_not_go_with_prefill_block_is_refused(knob, told):
    with pytest.raises(SpecError, match=told) as error:
        parse({"rate": 8, "prefill_block": 48} | knob)
    assert error.value.name == "prefill_block"


def test_a_prompt_that_is_compressed_while_it_comes_in_is_not_asked_a_question():
    assert parse({"rate": 8, "prefill_block": 256}).policy == "virtual-repeat"
