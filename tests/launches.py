"""What a GPU would be launched with: Triton's kernels, and torch's operations on its tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections import Counter
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

#: Operations that only make a tensor, or look at one.
_NO_KERNEL = ("empty", "new_empty", "lift_fresh", "_unsafe_view", "set_", "resize_")


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A launch, by all that Triton compiles a kernel of its own for."""

    name: str
    compiled_for: tuple


class Launches(TorchDispatchMode):
    """Counts while it is entered.

    Parameters
    ----------
    run : whether Triton's kernels run. On fake tensors they cannot; tensors of another device
        than a GPU are then an error.

    Attributes
    ----------
    kernels : Triton's launches, in order.
    operations : torch's, by name.
    """

    def __init__(self, *, run: bool):
        super().__init__()
        self._run = run
        self.kernels: list[Kernel] = []
        self.operations: Counter[str] = Counter()

    def forget(self) -> None:
        self.kernels.clear()
        self.operations.clear()

    @property
    def count(self) -> int:
        return len(self.kernels) + self.operations.total()

    def __enter__(self):
        self._patches = contextlib.ExitStack()
        for kind in (InterpretedFunction, JITFunction):
            self._patches.enter_context(mock.patch.object(kind, "run", self._noting(kind.run)))
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.close()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        touched = tree_leaves((args, kwargs, result))
        name = func.overloadpacket.__name__
        if (
            any(isinstance(each, torch.Tensor) and each.is_cuda for each in touched)
            and func.namespace == "aten"
            and not name.startswith(_NO_KERNEL)
            and not (func.is_view and _is_view(args[0], result))
        ):
            self.operations[name] += 1
        return result

    def _noting(self, run):
        def noting(kernel, *args, grid, warmup, **kwargs):
            self.kernels.append(_kernel(kernel, args, kwargs))
            if self._run:
                return run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            for each in args:
                assert not isinstance(each, torch.Tensor) or each.is_cuda
            return None

        return noting


def _is_view(given: torch.Tensor, result: Any) -> bool:
    """Whether there was nothing to copy, as `reshape` and `to` may find."""
    storages = {each.untyped_storage()._cdata for each in tree_leaves(result)}
    return storages <= {given.untyped_storage()._cdata}


def _kernel(kernel: Any, args: tuple, kwargs: dict) -> Kernel:
    """See `JITFunction` and its specialization of arguments."""
    options = kernel.kwargs if isinstance(kernel, InterpretedFunction) else vars(kernel)
    as_they_are = options.get("do_not_specialize") or ()
    anywhere = options.get("do_not_specialize_on_alignment") or ()
    names = kernel.arg_names
    given = dict(zip(names, args, strict=False)) | kwargs
    constants = _constants(kernel)
    found = []
    for name, value in given.items():
        if name in constants or name not in names:
            found.append((name, value))
        elif isinstance(value, torch.Tensor):
            aligned = name in anywhere or _aligned(value)
            found.append((name, value.dtype, aligned))
        elif isinstance(value, int) and name not in as_they_are:
            kind = 1 if value == 1 else value % 16 == 0
            found.append((name, abs(value) >= 1 << 31, kind))
        else:
            found.append((name, type(value)))
    return Kernel(kernel.fn.__name__, tuple(found))


def _constants(kernel: Any) -> set[str]:
    parameters = inspect.signature(kernel.fn).parameters.values()
    return {each.name for each in parameters if "constexpr" in str(each.annotation)}


def _aligned(tensor: torch.Tensor) -> bool:
    """Of memory that an allocator gave; fake tensors have no address."""
    return tensor.storage_offset() * tensor.itemsize % 16 == 0
