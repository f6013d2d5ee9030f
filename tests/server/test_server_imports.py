"""What the gateway imports: of ours `sgl_kvc.spec` alone, and neither torch nor SGLang."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import kvc_server
import pytest

import sgl_kvc.spec

FOLDER = Path(kvc_server.__file__).parent
OURS = {"sgl_kvc", "kvc_kernels", "kvc_recall", "kvc_smollm2", "kvc_server", "bench"}
#: The embedded models' paths and a question for one, for `serve` without a model and for `demo`:
#: inside functions, because a gateway can be installed without them.
EMBEDDED = {
    ("embedded.py", "kvc_recall"),
    ("embedded.py", "kvc_smollm2.fetch"),
    ("demo.py", "kvc_recall.tasks"),
}
#: Commands with libraries of their own; `sgl-kvc` starts them by name, they are not the gateway.
COMMANDS = {"evaluation"}


def _imported(node: ast.AST) -> Iterator[str]:
    """Dotted names; of ``from a import b`` both ``a`` and, in case it is a module, ``a.b``."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "relative imports would escape this test"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _allowed(name: str) -> bool:
    parts = name.split(".")
    if parts[0] == "sgl_kvc":
        return parts[1:2] == ["spec"] or parts[1:] == ["__version__"]
    return parts[0] not in {*OURS, "torch", "sglang"} or parts[0] == "kvc_server"


def _files() -> list[Path]:
    files = sorted(FOLDER.rglob("*.py"))
    return [path for path in files if path.relative_to(FOLDER).parts[0] not in COMMANDS]


@pytest.mark.parametrize("path", _files(), ids=lambda path: path.name)
def test_of_ours_only_the_spec(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        for name in _imported(node):
            embedded = any(
                path.name == file and name.startswith(module) for file, module in EMBEDDED
            )
            assert _allowed(name) or (embedded and node not in tree.body), name


def test_the_spec_imports_nothing_else_of_ours() -> None:
    for path in Path(sgl_kvc.spec.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            for name in _imported(node):
                assert _allowed(name), f"{path.name}: {name}"
                assert not name.startswith("kvc_server"), f"{path.name}: {name}"


def test_the_rule_is_checked() -> None:
    for line in ("import torch", "from sgl_kvc import profile", "from sgl_kvc.policy import base",
                 "import sgl_kvc.report", "from kvc_kernels import score"):  # fmt: skip
        (node,) = ast.parse(line).body
        assert not all(map(_allowed, _imported(node))), line
    for line in ("from sgl_kvc import __version__, spec", "from sgl_kvc.spec import parse"):
        (node,) = ast.parse(line).body
        assert all(map(_allowed, _imported(node))), line


def test_neither_torch_nor_sglang_is_loaded() -> None:
    """All of the gateway, the spec with every method read, and what the embedded model gives it."""
    modules = [".".join(path.relative_to(FOLDER.parent).with_suffix("").parts) for path in _files()]
    program = f"""
import importlib, sys
for name in {[*modules, "sgl_kvc.spec", "kvc_recall", "kvc_recall.tasks"]!r}:
    importlib.import_module(name.removesuffix(".__init__"))
from kvc_server.policies import catalogue
catalogue()
print(sorted(name for name in sys.modules if name.split(".")[0] in
             ("torch", "sglang", "transformers", "triton", "kvc_kernels")))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
