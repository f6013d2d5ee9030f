"""Numbers on their way from the device to the host."""

from __future__ import annotations

import torch


class HostCopy:
    """Copies a small tensor behind what its stream has to do; nothing waits until it is read.

    Parameters
    ----------
    tensor : on any device; of the current stream, if that is a GPU.
    """

    def __init__(self, tensor: torch.Tensor):
        self._tensor, self._done = tensor, None
        if tensor.is_cuda:
            self._tensor = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True
            )
            self._tensor.copy_(tensor, non_blocking=True)
            self._done = torch.cuda.Event()
            self._done.record()

    def tolist(self) -> list:
        """The numbers; waits for the copy if it has not come."""
        return self._arrived().tolist()

    def tobytes(self) -> bytes:
        """The same as they lie in memory."""
        return self._arrived().numpy().tobytes()

    def _arrived(self) -> torch.Tensor:
        if self._done is not None:
            self._done.synchronize()
        return self._tensor
