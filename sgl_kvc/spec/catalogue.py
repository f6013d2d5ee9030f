"""Which scorers and apportioners there are, and the parameters of each.

Read from the source of ``policy/scorers/*.py`` and ``policy/apportioners/*.py`` without running
it, because the gateway asks too and must not import torch. A method's file says, at module level::

    SOURCE = "SnapKV, arXiv 2404.14469, section 4"
    PARAMETERS = {
        "window": {"default": 8, "min": 1, "max": 1024},
        "pool": {"default": 7, "min": 1, "max": 255, "step": 2},    # steps count from the min
        "gamma": {"default": 200.0, "min": 0.0, "max": 1e6},        # takes fractions
        "pooling": {"default": "max", "choices": ["max", "mean"]},
        "values": {"default": False, "choices": [False, True]},
    }
    NEEDS = ("head_profile",)            # of policy/facts.py's ModelFacts
    CONTINUAL = "attention"              # compression can go on in decode (docs/design.md)

For a scorer CONTINUAL is how its scores go on in decode: "attention", what decode's queries pay is
added to what `score` returned (squared, but for a parameter `norm` of "l1"); "position", the
newest keys first and nothing is counted; or "rescored", by its function `rescore`, from the keys
that are held and what decode's last queries paid them. For an apportioner it is True. Without it
compression happens once, after prefill. What can go on so, but for "rescored", can also choose of a
prompt that is still coming in (``prefill_block``); a scorer that looks at every query needs a
function ``keep`` for it. The file describes each parameter in the docstring of its function, in
numpydoc's form.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

FAMILIES = {"scorers": "score", "apportioners": "apportion"}
#: What a method's file may say of compression in decode.
CONTINUAL = {"scorers": (False, "attention", "position", "rescored"), "apportioners": (False, True)}
_CONSTANTS = ("SOURCE", "PARAMETERS", "NEEDS", "CONTINUAL")


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a method: a number in [min, max], or one of `choices`.

    Attributes
    ----------
    step : of whole numbers, counted from `min`.
    """

    name: str
    default: Any
    about: str
    min: float | None = None
    max: float | None = None
    step: int = 1
    choices: tuple[Any, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether only whole numbers are taken."""
        return isinstance(self.default, int)

    def to_json(self) -> dict[str, Any]:
        """Default, bounds (the step if it is not 1) or choices, and what it is."""
        limits: dict[str, Any] = {"choices": list(self.choices)}
        if not self.choices:
            limits = {"min": self.min, "max": self.max}
            limits |= {"step": self.step} if self.step != 1 else {}
        return {"default": self.default, **limits, "about": self.about}


@dataclasses.dataclass(frozen=True)
class Method:
    """A scorer or an apportioner.

    Attributes
    ----------
    all_queries : whether it looks at every query of the prompt, not at the last ones alone.
        Then no part of the prompt may come from the prefix cache.
    needs : the `facts.ModelFacts` it cannot do without.
    blockwise : whether it can choose of a prompt that is compressed while it comes in.
    continual : whether its choice can be repeated in decode; of a scorer how, "attention",
        "position" or "rescored"; empty or False if not.
    """

    family: str
    name: str
    summary: str
    source: str
    parameters: dict[str, Parameter]
    all_queries: bool
    needs: tuple[str, ...]
    continual: str | bool
    blockwise: bool


@functools.cache
def methods(family: str) -> dict[str, Method]:
    """The methods of `family` ("scorers" or "apportioners") by name, one a file."""
    folder = Path(__file__).parents[1] / "policy" / family
    files = sorted(path for path in folder.glob("*.py") if not path.stem.startswith("_"))
    return {method.name: method for method in (_read(family, path) for path in files)}


def _read(family: str, path: Path) -> Method:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {
        target.id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and target.id in _CONSTANTS
    }
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    about = _descriptions(ast.get_docstring(functions[FAMILIES[family]]) or "")
    limits = constants.get("PARAMETERS", {})
    continual = constants.get("CONTINUAL", False)
    if continual not in CONTINUAL[family]:
        known = ", ".join(repr(kind) for kind in CONTINUAL[family] if kind)
        raise ValueError(f"{path}: CONTINUAL is {continual!r}; it can be {known}")
    all_queries = family == "scorers" and "observe" in functions
    alone = continual in (True, "attention", "position") and not all_queries
    return Method(
        family,
        path.stem.replace("_", "-"),
        (ast.get_docstring(tree) or "").partition("\n\n")[0].replace("\n", " "),
        constants.get("SOURCE", ""),
        {name: _parameter(name, given, about.get(name, "")) for name, given in limits.items()},
        all_queries,
        tuple(constants.get("NEEDS", ())),
        continual,
        alone or "keep" in functions,
    )


def _parameter(name: str, given: dict[str, Any], about: str) -> Parameter:
    choices = tuple(given.get("choices", ()))
    return Parameter(name, about=about, **(given | {"choices": choices}))


def _descriptions(docstring: str) -> dict[str, str]:
    """The entries of a numpydoc "Parameters" section: name to text on one line."""
    section = re.search(r"^Parameters\n-+\n(.*?)(?=^\S+\n-+\n|\Z)", docstring, re.M | re.S)
    found = {}
    for names, first, rest in re.findall(
        r"^(\w[\w, ]*?) : (.*)\n?((?:    .*\n?)*)", section[1] if section else "", re.M
    ):
        for name in names.split(", "):
            found[name] = " ".join(f"{first} {rest}".split())
    return found
