"""From a prompt's scores to the KVs every head keeps."""

from __future__ import annotations

import dataclasses

import torch
from kvc_kernels.select import kept_positions, rank_pages

from sgl_kvc.policy.base import apportioner
from sgl_kvc.spec import CompressionSpec

#: Above every score; falls towards the end of the protected positions so that, should the
#: budget not hold them all, sinks outlive recent keys and newer keys outlive older ones.
_PROTECTED = 1e30


@dataclasses.dataclass(frozen=True)
class Selection:
    """What is kept of positions [0, S).

    Attributes
    ----------
    pages : int64 [L * H], whole pages of every head.
    positions : int64 [sum(pages) * P], ascending within a head, heads in canonical order.
    """

    pages: torch.Tensor
    positions: torch.Tensor


def select(
    scores: torch.Tensor, spec: CompressionSpec, segment_blocks: int, page_size: int
) -> Selection:
    """Choose what fills `segment_blocks` blocks (arXiv 2410.00161, algorithm 1).

    Parameters
    ----------
    scores : float32 [L, H, S], finite; S is a multiple of `page_size`. Overwritten.
    segment_blocks : whole blocks the segment gets, at most S / page_size.
    """
    layers, heads, total = scores.shape
    protect(scores, spec.sinks, page_size)
    order, page_scores = rank_pages(scores.view(layers * heads, total), page_size)
    pages = apportioner(spec.apportioner)(
        page_scores.view(layers, heads, -1), segment_blocks * layers * heads
    ).flatten()
    return Selection(pages, kept_positions(order, pages, page_size))


def protect(scores: torch.Tensor, sinks: int, page_size: int) -> None:
    """Lift the first `sinks` positions and the last page above every score, in place.

    Attention sinks: arXiv 2309.17453. The last page: what was read just before the answer.
    """
    total = scores.shape[-1]
    sinks = min(sinks, total)
    rank = torch.arange(total, device=scores.device, dtype=scores.dtype)
    scores[..., total - page_size :] = _PROTECTED * (1 + rank[-page_size:] / total)
    scores[..., :sinks] = _PROTECTED * (3 - rank[:sinks] / total)
