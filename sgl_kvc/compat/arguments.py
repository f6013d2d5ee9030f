"""SGLang's options: what ours imply, and our own."""

from __future__ import annotations

import os
from typing import Any

from sgl_kvc.compat import BACKEND
from sgl_kvc.compat.hook import Hook
from sgl_kvc.spec import WORKER_KEYS


class Secret(str):
    """A text that SGLang uses as any other and that no log shows: it logs all its arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'...'"


def default_arguments(args, *_: Any) -> None:
    """``ServerArgs.__post_init__``: what ``--attention-backend kvc`` implies."""
    if args.attention_backend == BACKEND:
        if args.radix_cache_backend is None:
            args.radix_cache_backend = BACKEND
        if args.page_size is None:
            args.page_size = 16
        if args.cuda_graph_backend_prefill is None:
            args.cuda_graph_backend_prefill = "disabled"  # "breakable" has not run yet
    take_keys(args)


def take_keys(args: Any) -> None:
    """Keys that whoever started us gave in the environment; every local user can read argv."""
    for field, variable in WORKER_KEYS.items():
        if key := os.environ.get(variable):
            setattr(args, field, Secret(key))


def add_arguments(_result: Any, parser) -> None:
    """``ServerArgs.add_cli_args``: our own options."""
    from sgl_kvc.attention.select import CHOICES

    parser.add_argument(
        "--kvc-decode",
        choices=CHOICES,
        help="decode kernel of --attention-backend kvc (docs/gpu.md)",
    )


def take_arguments(_cls, args) -> None:
    """``ServerArgs.from_cli_args``: they travel to SGLang's processes in the environment."""
    from sgl_kvc.attention.select import VARIABLE

    if getattr(args, "kvc_decode", None):
        os.environ[VARIABLE] = args.kvc_decode


_ARGUMENTS = "sglang.srt.server_args.ServerArgs"

HOOKS = (
    Hook(
        f"{_ARGUMENTS}.__post_init__",
        "BEFORE",
        default_arguments,
        "one flag chooses attention backend, radix cache and a block size; keys are not for argv",
    ),
    Hook(
        f"{_ARGUMENTS}.add_cli_args",
        "AFTER",
        add_arguments,
        "upstream has no place for a plugin's options",
    ),
    Hook(
        f"{_ARGUMENTS}.from_cli_args",
        "BEFORE",
        take_arguments,
        "upstream has no place for a plugin's options",
    ),
)
