"""How far values can move a layer's output."""

from __future__ import annotations

import torch


def projected_norm(
    values: torch.Tensor, projection: torch.Tensor, *, block: int = 1 << 18
) -> torch.Tensor:
    """L1 norm of every value after the output projection, averaged over its query heads.

    How far the value can move the layer's output (CriticalKV, arXiv 2502.03805).

    Parameters
    ----------
    values : [n, H, Dv].
    projection : [hidden, H*G*Dv].
    block : elements projected at a time; such that they stay in a CPU's cache.

    Returns
    -------
    norms : float32 [H, n].
    """
    heads, dim = values.shape[1:]
    hidden = projection.shape[0]
    group = projection.shape[1] // (heads * dim)
    by_head = projection.float().view(hidden, heads, group, dim).permute(1, 3, 2, 0).flatten(2)
    norms = []
    for part in values.split(max(1, block // (heads * group * hidden))):
        projected = part.float().transpose(0, 1) @ by_head  # [H, b, G*hidden]
        norms.append(projected.abs().sum(dim=-1) / group)
    return torch.cat(norms, dim=1)


def projected_norm_reference(values: torch.Tensor, projection: torch.Tensor) -> torch.Tensor:
    """`projected_norm`, one value and head at a time."""
    n, heads, dim = values.shape
    group = projection.shape[1] // (heads * dim)
    norms = torch.zeros(heads, n)
    for head in range(heads):
        for member in range(head * group, (head + 1) * group):
            columns = projection[:, member * dim : (member + 1) * dim].float()
            for i in range(n):
                norms[head, i] += (columns @ values[i, head].float()).abs().sum() / group
    return norms
