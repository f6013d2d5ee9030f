"""The order of what the scheduler and a forward do on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def behind(stream: torch.cuda.Stream | None, *used: torch.Tensor) -> Iterator[None]:
    """Have the device do what follows behind all that `stream` has to do.

    Parameters
    ----------
    stream : that forwards run in; None where it is the scheduler's own, and nothing is needed.
    used : tensors of the scheduler's stream that are used inside.
    """
    if stream is None:
        yield
        return
    scheduling = torch.cuda.current_stream()
    stream.wait_stream(scheduling)
    with torch.cuda.stream(stream):
        yield
    for tensor in used:
        tensor.record_stream(stream)
    scheduling.wait_stream(stream)  # rows are read there
