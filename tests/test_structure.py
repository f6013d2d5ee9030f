"""The packages' order: arrows only point down, no circles, no long files.

Imports inside functions and for type checkers count as well: who has to be read to understand a
module does not depend on when it is imported.
"""

from __future__ import annotations

import graphlib
from pathlib import Path

import grimp
import pytest
from kvc_eval.cli import LIBRARIES

ROOT = Path(__file__).parents[1]
OURS = (
    "kvc_kernels", "kvc_recall", "kvc_smollm2", "sgl_kvc", "kvc_server", "kvc_eval", "bench",
    "tests",
)  # fmt: skip
#: From the top down; what stands in one line may import each other.
LAYERS = (
    ("tests",),
    ("bench",),
    ("kvc_eval",),
    ("kvc_server",),
    ("sgl_kvc.lang",),
    ("sgl_kvc.plugin", "sgl_kvc.platform", "sgl_kvc.profile_command"),
    ("sgl_kvc.compat",),
    ("sgl_kvc.cache", "sgl_kvc.attention", "sgl_kvc.report"),
    ("sgl_kvc.pool",),
    ("sgl_kvc.policy",),
    ("sgl_kvc.profile",),
    ("sgl_kvc.spec",),
    ("kvc_kernels",),
    ("kvc_recall",),
    ("kvc_smollm2",),
)
#: What a package may import of ours besides itself, if not all that stands below it. Of
#: `sgl_kvc` that is the package alone, for its version.
ONLY = {
    "kvc_recall": (),
    "kvc_smollm2": (),
    "kvc_kernels": (),
    "sgl_kvc.spec": (),
    "sgl_kvc.lang": ("sgl_kvc.spec", "sgl_kvc.compat.check", "sgl_kvc.compat.symbols"),
    "sgl_kvc": ("kvc_kernels",),
    "kvc_server": ("sgl_kvc", "sgl_kvc.spec", "kvc_recall", "kvc_smollm2"),
    "kvc_eval": ("kvc_server", "sgl_kvc.spec", "kvc_recall"),
}
ENGINE = ("torch", "sglang", "triton", "transformers")
#: Libraries that a package must do without.
NEVER = {
    "sgl_kvc.spec": ENGINE,
    "kvc_server": (*ENGINE, *LIBRARIES),
    "kvc_eval": ENGINE,
    "kvc_kernels": ("sglang", "transformers"),
    "kvc_recall": ("sglang", "triton"),
    "kvc_smollm2.fetch": ENGINE,
}
MOST_LINES = 300


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*OURS, include_external_packages=True, cache_dir=None)


def within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def imports(graph: grimp.ImportGraph, package: str) -> list[tuple[str, str]]:
    """(importer, imported) of every import in a package, itself left out."""
    return sorted(
        (module, imported)
        for module in graph.modules
        if within(module, package)
        for imported in graph.find_modules_directly_imported_by(module)
        if not within(imported, package)
    )


def test_every_module_is_in_the_graph(graph: grimp.ImportGraph) -> None:
    """A folder without ``__init__.py`` would not be looked at."""
    for path in python_files():
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        if parts[0] in ("kernels", "models", "server", "evaluation"):
            parts = parts[1:]
        name = ".".join(parts).removesuffix(".__init__")
        assert name in graph.modules, f"{path.relative_to(ROOT)} is in no package"


def test_every_package_has_its_layer(graph: grimp.ImportGraph) -> None:
    listed = {module for layer in LAYERS for module in layer}
    assert listed == graph.find_children("sgl_kvc") | set(OURS) - {"sgl_kvc"}


def test_arrows_point_down(graph: grimp.ImportGraph) -> None:
    layers = [grimp.Layer(*layer, independent=False) for layer in LAYERS]
    found = graph.find_illegal_dependencies_for_layers(layers)
    up = {
        " -> ".join((*sorted(route.heads), *route.middle, *sorted(route.tails)))
        for dependency in found
        for route in dependency.routes
    }
    assert not up, "\n".join(sorted(up))


def test_no_circles(graph: grimp.ImportGraph) -> None:
    edges = {
        module: {m for m in graph.find_modules_directly_imported_by(module) if m in graph.modules}
        for module in graph.modules
    }
    try:
        graphlib.TopologicalSorter(edges).prepare()
    except graphlib.CycleError as error:
        raise AssertionError(" <- ".join(error.args[1])) from None


@pytest.mark.parametrize("package", ONLY)
def test_who_may_import_whom(graph: grimp.ImportGraph, package: str) -> None:
    allowed = ONLY[package]
    others = [
        f"{module} -> {imported}"
        for module, imported in imports(graph, package)
        if imported.split(".")[0] in OURS
        and not any(
            imported == name or (name != "sgl_kvc" and within(imported, name)) for name in allowed
        )
    ]
    assert not others


@pytest.mark.parametrize("package", NEVER)
def test_what_a_package_does_without(graph: grimp.ImportGraph, package: str) -> None:
    found = [pair for pair in imports(graph, package) if pair[1].split(".")[0] in NEVER[package]]
    assert not found


def test_only_the_tests_of_the_benches_import_them(graph: grimp.ImportGraph) -> None:
    found = [pair for pair in imports(graph, "tests") if within(pair[1], "bench")]
    assert found, "the check looks at nothing"
    assert {module for module, _ in found if not within(module, "tests.bench")} == set()


def python_files() -> list[Path]:
    folders = ("bench", "evaluation", "kernels", "models", "server", "sgl_kvc", "tests")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def test_no_file_is_long() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in python_files()}
    assert len(lines) > 200, "the check looks at nothing"
    long = {str(path.relative_to(ROOT)): n for path, n in lines.items() if n > MOST_LINES}
    assert not long
