"""Who shares which blocks of a prompt."""

from __future__ import annotations

import pytest

from sgl_kvc.cache.request import Request
from sgl_kvc.cache.sharing import Sharing
from sgl_kvc.spec import OFF, chained_digests

PAGE = 4


def added(sharing: Sharing, tokens: list[int], namespace: str | None = None) -> Request:
    request = Request(OFF)
    sharing.add(request, tokens, namespace, PAGE)
    return request


def test_a_digest_follows_from_all_tokens_up_to_it():
    tokens = list(range(13))
    digests = chained_digests(tokens, None, PAGE)
    assert len(digests) == 3  # the last block is not whole
    assert len(set(digests)) == 3
    assert chained_digests(tokens[:9], None, PAGE) == digests[:2]
    assert chained_digests(tokens[:3], None, PAGE) == []
    for changed in range(12):
        other = [*tokens[:changed], 99, *tokens[changed + 1 :]]
        same = [a == b for a, b in zip(chained_digests(other, None, PAGE), digests, strict=True)]
        assert same == [block < changed // PAGE for block in range(3)]
    assert not set(chained_digests(tokens, "tenant", PAGE)) & set(digests)
    again = chained_digests([*tokens[4:8]] * 2, None, PAGE)
    assert again[0] != again[1], "the same tokens, but not the same prefix"


def test_a_block_counts_its_share():
    sharing = Sharing()
    long = added(sharing, list(range(16)))
    assert sharing.share(long, 0, 4) == 4
    half = added(sharing, [*range(8), *range(50, 58)])
    added(sharing, list(range(4)))
    added(sharing, list(range(16)), "another tenant's")
    assert sharing.share(long, 0, 4) == pytest.approx(1 / 3 + 1 / 2 + 1 + 1)
    assert sharing.share(half, 1, 3) == pytest.approx(1 / 2 + 1)
    assert sharing.share(half, 2, 2) == 0


def test_adding_a_request_twice_counts_it_once():
    """Every chunk of a prompt's prefill adds it."""
    sharing = Sharing()
    request = added(sharing, list(range(8)))
    sharing.add(request, list(range(8)), None, PAGE)
    assert sharing.share(request, 0, 2) == 2


def test_a_request_that_ends_leaves_the_blocks_to_others():
    sharing = Sharing()
    one, two = added(sharing, list(range(8))), added(sharing, list(range(8)))
    assert sharing.share(one, 0, 2) == 1
    sharing.remove(two)
    assert two.block_digests == []
    assert sharing.share(one, 0, 2) == 2
    sharing.remove(two)  # of a request that holds nothing
    assert sharing.share(one, 0, 2) == 2
    sharing.remove(one)
    assert not sharing.holders, "nothing is left behind"


def test_those_that_stay_still_share():
    sharing = Sharing()
    stays, also, *gone = (added(sharing, list(range(8))) for _ in range(4))
    sharing.remove(gone[0])
    assert sharing.share(stays, 0, 2) == pytest.approx(2 / 3)
    sharing.remove(gone[1])
    assert sharing.share(also, 0, 2) == 1


def test_clear_forgets_everybody():
    sharing = Sharing()
    added(sharing, list(range(8)))
    sharing.clear()
    assert sharing.share(added(sharing, list(range(8))), 0, 2) == 2
