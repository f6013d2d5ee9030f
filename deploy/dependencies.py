"""Print what the package depends on, a requirement a line: a layer of its own for the images."""

from __future__ import annotations

from pathlib import Path

import tomllib

PROJECT = tomllib.loads((Path(__file__).resolve().parents[1] / "pyproject.toml").read_text())

if __name__ == "__main__":
    project = PROJECT["project"]
    print("\n".join([*project["dependencies"], *project["optional-dependencies"]["otel"]]))
