"""`sgl-kvc policies`: what a request can ask for, as tables or as JSON."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from kvc_server.policies import catalogue


def run(options: argparse.Namespace, _: tuple[str, ...]) -> int:
    """Print the catalogue."""
    known = catalogue()
    if options.json:
        print(json.dumps(known, indent=2))
        return 0
    console = Console()
    console.print(_policies(known))
    for family in ("scorers", "apportioners"):
        console.print(_methods(family, known[family]))
    console.print(
        'A request names a policy, {"rate": 8, "policy": "snapkv"}, or a scorer and an '
        'apportioner, {"rate": 8, "scorer": "recency", "apportioner": "global"}; parameters stand '
        'beside them, {"rate": 8, "policy": "snapkv", "window": 16}.',
        markup=False,
    )
    return 0


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        table.add_column(column, no_wrap=index == 0)
    return table


def _policies(known: dict[str, Any]) -> Table:
    last = "source, and how it differs"
    table = _table("Policies", "policy", "scorer + apportioner", "parameters", last)
    for policy in known["policies"]:
        name = policy["name"]
        if name == known["default"]:
            name += " (default)"
        elif name == known["default_with_question_tokens"]:
            name += " (default, question apart)"
        parameters = {key: value["default"] for key, value in policy["parameters"].items()}
        parameters |= {"sinks": policy["sinks"], "recent": policy["recent"]}
        table.add_row(
            name,
            f"{policy['scorer']} + {policy['apportioner']}",
            " ".join(f"{key}={_short(value)}" for key, value in parameters.items()),
            policy["source"] + (f". {policy['differs']}" if policy["differs"] else ""),
        )
    return table


def _methods(family: str, listed: list[dict[str, Any]]) -> Table:
    table = _table(family.capitalize(), "name", "default", "values", "what it is")
    for method in listed:
        needs = f" Needs {', '.join(method['needs'])}." if method["needs"] else ""
        table.add_row(
            method["name"], "", "", f"{method['summary']} [{method['source']}]{needs}", style="bold"
        )
        for name, parameter in method["parameters"].items():
            table.add_row(
                f"  {name}", _short(parameter["default"]), _values(parameter), parameter["about"]
            )
    return table


def _values(parameter: dict[str, Any]) -> str:
    if "choices" in parameter:
        return ", ".join(_short(choice) for choice in parameter["choices"])
    step = f" by {parameter['step']}" if "step" in parameter else ""
    return f"{_short(parameter['min'])} to {_short(parameter['max'])}{step}"


def _short(value: Any) -> str:
    """A number without needless digits; true and false as JSON has them."""
    return f"{value:g}" if isinstance(value, float) else json.dumps(value).strip('"')
