"""What the catalogue reads from a method's file, without running it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sgl_kvc.spec import Parameter, catalogue

SCORER = '''"""What is looked at
most, in a few words.

A second paragraph.
"""

import nothing_of_this_runs

SOURCE = "Somebody, arXiv 1234.56789"
NEEDS = ("head_profile", "cos_sin")
CONTINUAL = "attention"
OTHER = nothing_of_this_runs.whatever
PARAMETERS = {
    "window": {"default": 8, "min": 1, "max": 1024, "step": 2},
    "gamma": {"default": 2.0, "min": 0.0, "max": 1e6},
    "pooling": {"default": "max", "choices": ["max", "mean"]},
    "hidden": {"default": 1, "min": 0, "max": 1},
}


def _helper(context):
    """Parameters
    ----------
    window : not this one.
    """


def score(context, window, gamma):
    """Score.

    Parameters
    ----------
    window, gamma : of the last queries,
        and on a second line.
    pooling : how neighbours count.

    Returns
    -------
    hidden : not a parameter's.
    """


def observe(context):
    """So it looks at every query."""
'''


@pytest.fixture
def written(tmp_path: Path):
    """The method that a file of this text describes."""

    def write(text: str, family: str = "scorers", name: str = "by_sight.py") -> catalogue.Method:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return catalogue._read(family, path)

    return write


def test_a_scorer(written):
    method = written(SCORER)
    assert (method.family, method.name) == ("scorers", "by-sight")
    assert method.summary == "What is looked at most, in a few words."
    assert method.source == "Somebody, arXiv 1234.56789"
    assert method.needs == ("head_profile", "cos_sin")
    assert method.continual == "attention"
    assert method.all_queries
    both = "of the last queries, and on a second line."
    assert method.parameters == {
        "window": Parameter("window", 8, both, 1, 1024, 2, ()),
        "gamma": Parameter("gamma", 2.0, both, 0.0, 1e6, 1, ()),
        "pooling": Parameter("pooling", "max", "how neighbours count.", choices=("max", "mean")),
        "hidden": Parameter("hidden", 1, "", 0, 1),
    }
    assert [p.whole for p in method.parameters.values()] == [True, False, False, True]


@pytest.mark.parametrize(("family", "function"), catalogue.FAMILIES.items())
def test_a_file_that_says_nothing(written, family, function):
    method = written(f"def {function}(context): ...\n", family)
    assert method == catalogue.Method(
        family, "by-sight", "", "", {},
        all_queries=False, needs=(), continual=False, blockwise=False,
    )  # fmt: skip


def test_an_apportioner(written):
    """One that observes layers does not need every query."""
    text = '"""Even."""\nCONTINUAL = True\ndef observe(c): ...\ndef apportion(c): ...\n'
    method = written(text, "apportioners")
    assert method.summary == "Even."
    assert method.continual is True
    assert not method.all_queries
    with pytest.raises(KeyError, match="score"):
        written(text, "scorers")


@pytest.mark.parametrize(
    ("family", "said", "known"),
    [
        ("scorers", "True", "'attention', 'position', 'rescored'"),
        ("scorers", "'attentoin'", "'attention', 'position', 'rescored'"),
        ("apportioners", "'attention'", "True"),
    ],
)
def test_words_of_decode_that_nobody_knows(written, family, said, known):
    text = f"CONTINUAL = {said}\ndef {catalogue.FAMILIES[family]}(c): ...\n"
    with pytest.raises(ValueError, match=rf"by_sight\.py: CONTINUAL is {said}; it can be {known}$"):
        written(text, family)


def test_parameters_as_json():
    assert Parameter("window", 8, "of queries", 1, 1024, 2).to_json() == {
        "default": 8, "min": 1, "max": 1024, "step": 2, "about": "of queries"
    }  # fmt: skip
    assert Parameter("gamma", 2.0, "a factor", 0.0, 9.5).to_json() == {
        "default": 2.0, "min": 0.0, "max": 9.5, "about": "a factor"
    }  # fmt: skip
    assert Parameter("pooling", "max", "", choices=("max", "mean")).to_json() == {
        "default": "max", "choices": ["max", "mean"], "about": ""
    }  # fmt: skip


@pytest.mark.parametrize("family", catalogue.FAMILIES)
def test_every_public_file_is_a_method(family):
    folder = Path(catalogue.__file__).parents[1] / "policy" / family
    files = [path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")]
    found = catalogue.methods(family)
    assert list(found) == sorted(name.replace("_", "-") for name in files)
    assert all(method.name == name for name, method in found.items())
