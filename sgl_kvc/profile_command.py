"""`sgl-kvc profile`: find a model's retrieval heads, write them down, show them.

Not part of the gateway, which has no torch; the `sgl-kvc` command starts it by name.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from sgl_kvc.profile import FILE_NAME, ProfileError, measure, write


def run(options: argparse.Namespace, _: tuple[str, ...]) -> int:
    """Write the profile and print it; 2, and a sentence, for what cannot be profiled."""
    try:
        profile, out = _profile(options)
    except ProfileError as error:
        print(f"sgl-kvc profile: {error}", file=sys.stderr)
        return 2
    write(profile, out)
    table = Table(title=profile["method"], title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("layer", justify="right")
    for head in range(len(profile["heads"][0])):
        table.add_column(f"head {head}", justify="right")
    for layer, heads in enumerate(profile["heads"]):
        table.add_row(str(layer), *(f"{head:.2f}" for head in heads))
    console = Console()
    console.print(table)
    console.print(f"Written to {out}.", soft_wrap=True)
    return 0


def _profile(options: argparse.Namespace) -> tuple[dict, Path]:
    """The profile and the file it goes to. Raises ProfileError."""
    out = Path(options.out) if options.out else Path(options.model) / FILE_NAME
    if not out.parent.is_dir():
        raise ProfileError(f"--out: {out.parent} is no folder; name a file in one that exists")
    return measure(
        options.model, tokens=options.tokens, copies=options.copies, seed=options.seed
    ), out
