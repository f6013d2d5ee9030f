"""The command line of `sgl-kvc eval`: what is refused, and what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from kvc_eval.cli import LIBRARIES
from kvc_server.cli import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "give either --url or --embedded"),
        (["--url", "http://a", "--embedded"], "give either --url or --embedded"),
        (["--url", "http://a", "--", "--tp", "2"], "arguments after --"),
        (["--url", "http://a", "--embedded", "smollm2"], "give either --url or --embedded"),
        (["--url", "http://a", "--servers", "2"], "--servers is for --embedded"),
        (["--url", "http://a", "--suite", "longbench"], "--suite longbench and --data"),
        (["--url", "http://a", "--data", "x"], "--suite longbench and --data"),
        (["--url", "http://a", "--metric", "f1"], "--metric is for"),
        (["--url", "http://a", "--rates", "1"], "--rates: 1 is off"),
        (["--url", "http://a", "--rates", "0.5"], "--rates: must be at least 1"),
        (["--url", "http://a", "--n", "0"], "--n must be at least 1"),
        (["--url", "http://a", "--length", "0"], "--length must be at least 1"),
        (["--url", "http://a", "--tasks", "fly"], "--tasks: unknown task fly; known are niah_"),
        (["--url", "http://a", "--suite", "longbench", "--data", "/none"], "--data: cannot read"),
    ],
)
def test_bad_options_end_in_one_sentence(
    arguments: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", *arguments]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"sgl-kvc eval: {problem}")
    assert printed.count("\n") == 1


def test_the_evaluation_never_imports_torch() -> None:
    code = (
        "import sys, kvc_eval.command\n"
        "from kvc_eval import metrics, suites\n"
        "[suites.load(name) for name in suites.SUITES]\n"
        "metrics.rouge_l('a', ('a',), ())\n"
        "sys.exit(bool({'torch', 'sglang', 'triton', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("library", LIBRARIES)
def test_without_the_extra_the_command_names_it(
    library: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, library, None)  # as if it were not installed
    assert main(["eval", "--url", "http://127.0.0.1:1"]) == 2
    assert capsys.readouterr().err == (
        f'sgl-kvc eval: {library} cannot be imported: pip install "sgl-kvc[eval]" installs what '
        "evaluation needs\n"
    )


def test_no_other_command_needs_the_extra() -> None:
    """The modules of all commands, and the parser, with the extra's libraries gone."""
    code = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({LIBRARIES}))\n"
        "import importlib, pkgutil, kvc_server, sgl_kvc.profile_command\n"
        "for module in pkgutil.iter_modules(kvc_server.__path__, 'kvc_server.'):\n"
        "    importlib.import_module(module.name)\n"
        "from kvc_server.cli import main\n"
        "main(['eval', '--help'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--embedded" in done.stdout


def test_the_extra_is_what_is_looked_for() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = [name.replace("-", "_") for name in project["optional-dependencies"]["eval"]]
    assert sorted(extra) == sorted(LIBRARIES)
    assert not set(extra) & {name.replace("-", "_") for name in project["dependencies"]}
