"""The models that come with the project, by the names `--embedded` takes."""

from __future__ import annotations

import argparse

from kvc_server.settings import SettingsError

RECALL, SMOLLM2 = "recall", "smollm2"
#: What each is served with. SGLang would take most of the memory for its pool, and on a CPU clear
#: it page by page: these are 256 MiB and 1.4 GiB.
SERVED_WITH = {
    RECALL: ("--served-model-name", RECALL, "--max-total-tokens", "65536"),
    SMOLLM2: ("--served-model-name", SMOLLM2, "--max-total-tokens", "32768"),
}


def add_option(parser: argparse.ArgumentParser, does: str) -> None:
    """``--embedded [NAME]``: None where it is not given, RECALL where no name is."""
    parser.add_argument(
        "--embedded", nargs="?", const=RECALL, choices=tuple(SERVED_WITH), metavar="MODEL",
        help=f"{does}: recall (default), or smollm2, a real language model that is fetched first",
    )  # fmt: skip


def embedded_model(name: str, worker_args: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Path of an embedded model, and `worker_args` behind those it is served with.

    Fetches it if need be. Raises SettingsError.
    """
    try:
        path = _recall() if name == RECALL else _smollm2()
    except ImportError as error:
        raise SettingsError(f"--model-path is needed: no embedded model ({error})") from None
    return path, (*SERVED_WITH[name], *worker_args)


def _recall() -> str:
    from kvc_recall import model_path

    return str(model_path())


def _smollm2() -> str:
    from kvc_smollm2.fetch import FetchFailed, model_path

    try:
        return str(model_path())
    except FetchFailed as error:
        raise SettingsError(f"--embedded smollm2: {error}") from None
