"""Scores of the prompts of a batch, in one tensor, and what kernels are told of where they are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from kvc_kernels.windows import Window

#: Of the table, by prompt: keys, queries of its window, and where it begins in the scores, and in
#: the rows of the queries, of their log-sum-exps, and in the slots.
COLUMNS = 6


@dataclasses.dataclass(frozen=True, eq=False)
class WindowScores:
    """What every prompt's keys get.

    Attributes
    ----------
    flat : float32 [sum of H * n], prompt after prompt.
    table : int64 [prompts, COLUMNS] on the device; None for one prompt, which needs none.
    lengths, own : n and w of every prompt.
    heads : H.
    """

    flat: torch.Tensor
    table: torch.Tensor | None
    lengths: list[int]
    own: list[int]
    heads: int

    @classmethod
    def empty(
        cls,
        windows: Sequence[Window],
        heads: int,
        begins: tuple[Sequence[int], ...],
        tables: dict | None,
    ) -> WindowScores:
        """Not filled yet; `begins` are the table's last columns."""
        lengths = [len(each.slots) for each in windows]
        own = [len(each.queries) for each in windows]
        places = [heads * sum(lengths[:nth]) for nth in range(len(lengths))]
        device = windows[0].queries.device
        table = None
        if len(windows) > 1:
            columns = (lengths, own, places, *begins)
            table = _on_device(tuple(zip(*columns, strict=True)), device, tables)
        flat = torch.empty(heads * sum(lengths), dtype=torch.float32, device=device)
        return cls(flat, table, lengths, own, heads)

    def unbind(self) -> list[torch.Tensor]:
        """float32 [H, n] of every prompt."""
        parts = self.flat.split([self.heads * length for length in self.lengths])
        return [part.view(self.heads, -1) for part in parts]


def _on_device(
    rows: tuple[tuple[int, ...], ...], device: torch.device, tables: dict | None
) -> torch.Tensor:
    """Copied once for all layers, as they ask for the same rows; waits for nothing."""
    tables = {} if tables is None else tables
    if rows not in tables:
        tables[rows] = torch.tensor(rows).to(device, non_blocking=True)
    return tables[rows]


def joined(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """One tensor that holds them all, and the row each begins with.

    Views of one tensor are not copied: where they begin is counted from the first of them.
    """
    first = tensors[0]
    step = first.stride(0)
    begins = [each.storage_offset() - first.storage_offset() for each in tensors]
    storage = first.untyped_storage()._cdata
    views = all(
        each.untyped_storage()._cdata == storage
        and each.stride() == first.stride()
        and begin % step == 0
        for each, begin in zip(tensors, begins, strict=True)
    )
    if len(tensors) == 1 or views:
        return first, [begin // step for begin in begins]
    lengths = [len(each) for each in tensors]
    return torch.cat(list(tensors)), [sum(lengths[:nth]) for nth in range(len(lengths))]
