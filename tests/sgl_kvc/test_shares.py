"""What apportioners share: pages split by weights, and how many are protected."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvc_kernels.select import protect

from sgl_kvc.policy.apportioners._shares import protected_pages, split
from tests.sgl_kvc.contexts import pages_context


@settings(max_examples=300, deadline=None)
@given(
    weights=st.lists(st.integers(0, 100), min_size=1, max_size=12),
    least=st.integers(0, 3),
    room=st.integers(0, 9),
    way=st.floats(0, 1),
)
def test_split_is_exact_within_bounds_and_in_the_weights_order(weights, least, room, way):
    count, most = len(weights), least + room
    total = count * least + round(way * count * room)
    shares = split(total, torch.tensor(weights), least, most).tolist()
    assert sum(shares) == total
    assert min(shares) >= least
    assert max(shares) <= most
    best_first = sorted(range(count), key=lambda i: -weights[i])
    for one, next_one in itertools.pairwise(best_first):
        if weights[one] > weights[next_one]:
            assert shares[one] >= shares[next_one]


@pytest.mark.parametrize(
    ("total", "weights", "least", "most", "shares"),
    [
        (12, [1, 2, 3], 1, 9, [2, 4, 6]),
        (10, [1, 1, 1], 1, 9, [4, 3, 3]),  # the remainder to the first
        (10, [1, 2, 3], 1, 9, [2, 3, 5]),  # 1.67, 3.33, 5
        (12, [1, 2, 9], 1, 5, [2, 5, 5]),  # what 9 cannot hold goes to 1 and 2, as far as it fits
        (9, [1, 2, 9], 1, 5, [1, 3, 5]),  # 1.33, 2.67, 5
        (6, [0, 0, 8], 1, 9, [1, 1, 4]),
        (14, [0, 0, 8], 1, 9, [3, 2, 9]),
        (5, [0, 0], 0, 3, [3, 2]),
        (6, [math.inf, 1], 0, 4, [4, 2]),
        (0, [3, 1], 0, 0, [0, 0]),
    ],
)
def test_split_by_hand(total, weights, least, most, shares):
    assert split(total, torch.tensor(weights), least, most).tolist() == shares
    bounds = (torch.tensor(number) for number in (least, most))
    assert split(torch.tensor(total), torch.tensor(weights), *bounds).tolist() == shares


@pytest.mark.parametrize(
    ("sinks", "recent", "expected"), [(0, 0, 1), (1, 0, 1), (8, 1, 2), (9, 8, 3)]
)
def test_protected_pages_are_told_from_the_scores(sinks, recent, expected):
    scores = torch.full((2, 3, 64), 1e20)
    protect(scores, sinks, recent)
    context = pages_context(scores.sort(descending=True).values[..., ::8], 5 * 6)
    assert int(protected_pages(context)) == expected
    assert int(protected_pages(replace(context, total=6))) == 1
