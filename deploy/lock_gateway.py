"""Print the versions that the gateway alone runs on: requirements-gateway.lock.

They are the part of requirements.lock that the package's dependencies need without SGLang and
NumPy (the gateway imports neither them nor torch), and what the extra `otel` adds. `make lock`
writes the file, from the environment that requirements.lock is about.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
#: Dependencies of the package that the worker needs and the gateway does not.
WORKER_ONLY = frozenset({"sglang", "numpy"})
EXTRA = "otel"
HEADER = (
    "# What the gateway alone runs on: no torch, no SGLang. A part of requirements.lock.\n"
    "# Made by: make lock\n"
)


def locked() -> dict[str, str]:
    """Lines of requirements.lock by the canonical name of the package."""
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    pins = [line for line in lines if re.match(r"[\w.-]+==", line)]
    return {canonicalize_name(line.split("==")[0]): line for line in pins}


def needed() -> set[str]:
    """Canonical names of all that the gateway needs, found in the installed packages."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *project["optional-dependencies"][EXTRA]]
    open_ = [Requirement(text) for text in texts]
    open_ = [each for each in open_ if canonicalize_name(each.name) not in WORKER_ONLY]
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    while open_:
        wanted = open_.pop()
        name = canonicalize_name(wanted.name)
        found.add(name)
        for extra in ("", *wanted.extras):
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            for text in metadata.requires(name) or ():
                needs = Requirement(text)
                if needs.marker is None or needs.marker.evaluate({"extra": extra}):
                    open_.append(needs)
    return found


def main() -> None:
    pins = locked()
    print(HEADER + "\n".join(pins[name] for name in sorted(needed())))


if __name__ == "__main__":
    main()
