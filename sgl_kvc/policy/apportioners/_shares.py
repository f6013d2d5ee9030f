"""What several apportioners need: pages split by weights or won, and how many are protected."""

from __future__ import annotations

import torch

from sgl_kvc.policy.pages import PagesContext

#: Below the scores of protected positions (`kvc_kernels.select.protect`), above all others.
LIFTED = 1e29

#: What a weight of zero counts, against the largest: first all others get their maximum.
_NOTHING = 1e-12


def split(
    total: int | torch.Tensor,
    weights: torch.Tensor,
    min_share: int | torch.Tensor,
    max_share: int | torch.Tensor,
) -> torch.Tensor:
    """Whole shares of `total` in proportion to `weights`, each in [min_share, max_share].

    What the bounds cut off or add is shared by the others, in proportion again, so the shares
    are ``clamp(x * weights, min_share, max_share)`` for the one x where they sum to `total`; then
    they are rounded by largest remainder, equal remainders in order. Nothing waits for the device.

    Parameters
    ----------
    total, min_share, max_share : whole numbers, or tensors of one, with
        ``R * min_share <= total <= R * max_share``.
    weights : [R], not negative; all zero counts as all equal.

    Returns
    -------
    shares : int64 [R], summing to `total`.
    """
    weights = weights.double()
    weights = (weights / weights.amax()).nan_to_num(1.0).clamp(_NOTHING, 1.0)
    low, high = (weights.new_zeros(()) + bound for bound in (min_share, max_share))
    # The sum of the shares is linear in x between the points where a share meets a bound.
    corners = torch.cat([low / weights, high / weights]).sort().values
    at_corner = (corners[:, None] * weights).clamp(low, high)
    sums = at_corner.sum(dim=1)
    after = (sums < total).sum().clamp(max=len(sums) - 1).view(1)
    before = (after - 1).clamp(min=0)
    way = (total - sums[before]) / (sums[after] - sums[before])
    exact = torch.lerp(at_corner[before], at_corner[after], way.nan_to_num(0.0)[:, None])[0]

    whole = exact.floor()
    remainder = torch.where(whole < high, ((exact - whole) * 1e6).round(), -1.0)
    order = remainder.sort(descending=True, stable=True).indices
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    return (whole + (place < total - whole.sum())).long()


def compete(context: PagesContext, per_head: torch.Tensor, floor: float) -> torch.Tensor:
    """Pages of heads that compete within their layer: int64 [L, H].

    Parameters
    ----------
    per_head : int64 [L], pages a head of each layer gets on average, at least 1.
    floor : share of it that every head gets before the others are competed for.
    """
    safe = (floor * per_head.double() - 1e-9).ceil().long().clamp(min=1)
    return context.compete(context.heads * (per_head - safe), safe)


def protected_pages(context: PagesContext) -> torch.Tensor:
    """Pages that hold a head's sinks and recent keys, the same for all: int64 [] in [1, mean]."""
    return context.above(LIFTED)[0, 0].clamp(1, context.mean)
