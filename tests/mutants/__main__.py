"""`make mutants`: how many small faults in the code do the unit tests notice?

mutmut changes one operator, number, argument or name at a time and runs the tests that reach the
function; [tool.mutmut] in pyproject.toml says where. It wants every package beside its settings,
so they are copied to build/mutants first. The survivors go to ``tests/mutants/survivors.md``, with
the reasons that ``tests/mutants/reasons.toml`` gives.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import tomllib
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code
from mutmut.utils.file_utils import walk_mutatable_files

ROOT = Path(__file__).parents[2]
STAGE = ROOT / "build/mutants"
HERE = ROOT / "tests/mutants"
PACKAGES = ("sgl_kvc", "kernels/kvc_kernels", "server/kvc_server", "models/kvc_recall",
            "models/kvc_smollm2", "evaluation/kvc_eval", "tests", "bench")  # fmt: skip
CAUGHT = ("killed", "timeout", "segfault", "suspicious", "caught by type check")
WANTED = 0.9

HEAD = """# Mutants that survive

Made by `make mutants` at commit {commit}; {caught} of {total} mutants were caught.

| part | mutants | caught | |
| --- | ---: | ---: | ---: |
{table}

What is not mutated: decorated functions (properties, cached properties, context managers) and what
is computed at import, which the tool leaves alone; texts for people, logging and assertions for the
type checker, which [tool.mutmut] in pyproject.toml excludes.

"""


def stage(fresh: bool) -> None:
    """Copy the packages side by side; unchanged files keep their age, so results stay."""
    if fresh:
        shutil.rmtree(STAGE, ignore_errors=True)
    for package in PACKAGES:
        target, ignored = STAGE / Path(package).name, shutil.ignore_patterns("__pycache__")
        if package == "tests":
            shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(ROOT / package, target, dirs_exist_ok=True, ignore=ignored)
    shutil.copy2(ROOT / "pyproject.toml", STAGE)


def mutmut(*arguments: str) -> None:
    """Run mutmut's command line in the copy."""
    packages = [path for path in sys.path if "site-packages" in path]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(packages), "OMP_NUM_THREADS": "1", "KVC_LIVES": "8",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }  # fmt: skip
    code = "from mutmut.__main__ import cli; cli()"
    subprocess.run([sys.executable, "-c", code, *arguments], cwd=STAGE, env=environment, check=True)


def files() -> Iterator[SourceFileMutationData]:
    """What is known of the mutants of every file."""
    for path in walk_mutatable_files():
        data = SourceFileMutationData(path=path)
        data.load()
        yield data


def statuses() -> dict[str, str]:
    """What became of every mutant."""
    return {
        name: status_by_exit_code[code]
        for data in files()
        for name, code in data.exit_code_by_key.items()
    }


def forget_survivors() -> None:
    """Have those that were not caught run again."""
    for data in files():
        for name, code in data.exit_code_by_key.items():
            if status_by_exit_code[code] not in CAUGHT:
                data.exit_code_by_key[name] = None
        data.save()


def part(name: str) -> str:
    """The package of a mutant, as in ``sgl_kvc.cache``; the gateway's files by themselves."""
    return ".".join(name.split(".")[:2])


def changed(name: str) -> tuple[str, str]:
    """The lines before and after."""
    lines = get_diff_for_mutant(name).splitlines()[2:]
    return tuple(
        " ".join(line[1:].strip() for line in lines if line.startswith(sign)) for sign in "-+"
    )


def survivors(names: list[str]) -> str:
    """One line a survivor, under its reason."""
    given = tomllib.loads((HERE / "reasons.toml").read_text())["reason"]
    by_reason = defaultdict(list)
    for name in names:
        function = name.rpartition("__mutmut_")[0]
        function = function.replace(".xǁ", ".").replace(".x_", ".").replace("ǁ", ".")
        before, after = changed(name)
        why = (
            each["why"]
            for each in given
            if fnmatch.fnmatch(function, each.get("function", "*"))
            and each.get("before", "") in before
            and each.get("after", "") in after
        )
        by_reason[next(why, "No reason yet")].append(f"* `{function}`: `{before}` → `{after}`")
    return "\n".join(f"## {why}\n\n" + "\n".join(lines) + "\n" for why, lines in by_reason.items())


def report() -> float:
    """Write ``survivors.md``, print the numbers by part, return the share that was caught."""
    found = statuses()
    total = Counter(map(part, found))
    caught = Counter(part(name) for name, status in found.items() if status in CAUGHT)
    table = [
        f"| `{each}` | {total[each]} | {caught[each]} | {caught[each] / total[each]:.0%} |"
        for each in sorted(total)
    ]
    commit = subprocess.run(
        ["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True
    ).stdout.strip()
    left = [name for name, status in found.items() if status not in CAUGHT]
    head = HEAD.format(
        commit=commit, caught=caught.total(), total=total.total(), table="\n".join(table)
    )
    (HERE / "survivors.md").write_text(head + survivors(left))
    print("", *table, sep="\n")
    return caught.total() / total.total()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--resume", action="store_true", help="run again what was not caught")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("names", nargs="*", help="mutants or patterns; all if none")
    args = parser.parse_args()
    if not args.report:
        stage(fresh=not args.resume)
    os.chdir(STAGE)  # where mutmut finds its settings
    if args.resume:
        forget_survivors()
    if not args.report:
        mutmut("run", *args.names)
    share = report()
    print(f"\n{share:.1%} caught, {WANTED:.0%} wanted; the survivors: {HERE}/survivors.md")
    return 0 if share >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
