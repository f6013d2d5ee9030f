"""Rotations by a constant, of every kind of table, against rotating from the start."""

from __future__ import annotations

import pytest
import torch
from kvc_kernels.rotary import rotate, rotation_by

DIM, POSITIONS = 16, 64


def _llama3(frequency: torch.Tensor) -> torch.Tensor:
    """Llama 3's scaling: low frequencies eight times as slow, those between in part."""
    length = 2 * torch.pi / frequency
    smooth = ((32 / length - 1) / 3).clamp(0, 1)
    return (1 - smooth) * frequency / 8 + smooth * frequency


def table(kind: str) -> torch.Tensor:
    rotated = DIM // 2 if kind == "partial" else DIM
    frequency = 100.0 ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    frequency = _llama3(frequency) if kind in ("llama3", "yarn") else frequency
    angles = torch.outer(torch.arange(POSITIONS).double(), frequency)
    return (1.3 if kind == "yarn" else 1.0) * torch.cat((angles.cos(), angles.sin()), -1).float()


KINDS = ("plain", "llama3", "yarn", "partial")


@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("position", "shift"), [(0, 0), (0, 63), (20, 43), (5, 1)])
def test_a_state_moves_on_as_if_rotated_there_at_once(neox, kind, position, shift):
    torch.manual_seed(0)
    raw, known = torch.randn(3, DIM), table(kind)
    there = rotate(raw, *known[position + shift].chunk(2), neox)
    here = rotate(raw, *known[position].chunk(2), neox)
    moved = rotate(here, *rotation_by(known, shift), neox)
    torch.testing.assert_close(moved, there, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", [64, 100, 1000])
def test_a_shift_may_pass_the_end_of_the_table(kind, shift):
    whole, known = rotation_by(table(kind), shift), table(kind)
    short = rotation_by(known[:10], shift)
    for got, expected in zip(short, whole, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    cos, sin = whole
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos), atol=1e-6, rtol=0)


@pytest.mark.parametrize("neox", [True, False])
def test_dims_beyond_the_rotated_ones_stay(neox):
    states = torch.randn(3, DIM)
    moved = rotate(states, *rotation_by(table("partial"), 7), neox)
    assert moved[:, DIM // 2 :].equal(states[:, DIM // 2 :])
    assert not moved[:, : DIM // 2].isclose(states[:, : DIM // 2]).all()
