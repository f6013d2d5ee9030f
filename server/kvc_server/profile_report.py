"""`sgl-kvc profile`: find a model's retrieval heads, write them down, show them."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from kvc_server.settings import SettingsError


def run(options: argparse.Namespace, _: tuple[str, ...]) -> int:
    """Write the profile and print it; raises SettingsError for what cannot be profiled."""
    from sgl_kvc.profile import FILE_NAME, ProfileError, measure, write

    folder = Path(options.model)
    out = Path(options.out) if options.out else folder / FILE_NAME
    if not out.parent.is_dir():
        raise SettingsError(f"--out: {out.parent} is no folder; name a file in one that exists")
    try:
        profile = measure(
            options.model, tokens=options.tokens, copies=options.copies, seed=options.seed
        )
    except ProfileError as error:
        raise SettingsError(str(error)) from error
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
