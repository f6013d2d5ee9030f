"""Questions about natural text that a small language model can answer, with one right answer each.

Every answer follows a `lead`, so that only what had to be found is scored.
"""

from __future__ import annotations

from random import Random

from kvc_eval.sample import Sample
from kvc_eval.suites.text.passages import clear_sentences, hide, passage

FACTS = 4  # hidden in a document
TURNS = 3  # questions of `turns`, the last of which is scored
_QUOTED_WORDS = (12, 30)  # of a sentence that is to be repeated
_GIVEN_WORDS = 5  # of it, in the question

_PLACES = (
    "Ashford", "Brookfield", "Carlisle", "Dunmore", "Eastwick", "Fairview", "Glenwood", "Harlow",
    "Kingsbury", "Lakeside", "Millbrook", "Northfield", "Oakdale", "Pinehurst", "Redcliff",
    "Stonebridge", "Thornton", "Westbrook",
)  # fmt: skip
_THINGS = (
    "bakery", "bridge", "brewery", "chapel", "ferry", "garden", "harbor", "hotel", "library",
    "lighthouse", "mill", "museum", "orchard", "school", "station", "theater",
)  # fmt: skip
_FIRST = (
    "Alice", "Arthur", "Clara", "Daniel", "Edith", "Frank", "Grace", "Harold", "Irene", "Jacob",
    "Laura", "Martin", "Nora", "Oliver", "Peter", "Rose", "Samuel", "Victor",
)  # fmt: skip
_LAST = (
    "Adams", "Baker", "Carter", "Dawson", "Ellis", "Foster", "Graham", "Hughes", "Irving", "Jordan",
    "Keller", "Lawson", "Mason", "Norris", "Parker", "Reynolds", "Sutton", "Turner",
)  # fmt: skip


def numbers(words: int, rng: Random) -> Sample:
    """`FACTS` places with a number of five digits each; one is asked for."""
    return _ask("numbers", "What", _numbered(rng), words, rng, asked=1)


def names(words: int, rng: Random) -> Sample:
    """`FACTS` places with the name of who keeps each; one is asked for."""
    return _ask("names", "Who", _kept(rng), words, rng, asked=1)


def turns(words: int, rng: Random) -> Sample:
    """Numbers or names, one of which is asked for after others were asked for and answered."""
    word, make = rng.choice((("What", _numbered), ("Who", _kept)))
    return _ask("turns", word, make(rng), words, rng, asked=TURNS)


def quote(words: int, rng: Random) -> Sample:
    """A sentence of the text, from its first words: as it stands there, word for word."""
    text = passage(words, rng)
    whole = " ".join(text)
    least, most = _QUOTED_WORDS
    fit = [
        sentence
        for sentence in text[clear_sentences(text) :]
        if least <= len(sentence.split()) <= most and whole.count(_begin(sentence)) == 1
    ]
    if not fit:
        raise ValueError("no sentence of the text can be asked for")
    sentence = rng.choice(fit)
    begin = _begin(sentence)
    return Sample(
        task="quote",
        document=whole,
        question=f'\n\nWhich sentence of the text above begins with "{begin}"? Repeat it exactly.',
        answers=(sentence.removeprefix(begin).strip(),),
        metric="string_match",
        max_tokens=80,
        lead=begin,
    )


def _begin(sentence: str) -> str:
    return " ".join(sentence.split()[:_GIVEN_WORDS])


def _places(rng: Random) -> list[str]:
    """`FACTS` places that share no word."""
    pairs = zip(rng.sample(_PLACES, FACTS), rng.sample(_THINGS, FACTS), strict=True)
    return [f"{place} {thing}" for place, thing in pairs]


def _numbered(rng: Random) -> list[tuple[str, str]]:
    values = rng.sample(range(10_000, 100_000), FACTS)
    return [
        (f"registry number of the {place}", str(value))
        for place, value in zip(_places(rng), values, strict=True)
    ]


def _kept(rng: Random) -> list[tuple[str, str]]:
    people = zip(rng.sample(_FIRST, FACTS), rng.sample(_LAST, FACTS), strict=True)
    return [
        (f"keeper of the {place}", f"{first} {last}")
        for place, (first, last) in zip(_places(rng), people, strict=True)
    ]


def _ask(
    task: str, word: str, facts: list[tuple[str, str]], words: int, rng: Random, asked: int
) -> Sample:
    """Hide all facts, ask for `asked` of them one after another; the last is scored."""
    document = hide([f"The {what} is {value}." for what, value in facts], words, rng)
    chosen = rng.sample(facts, asked)
    questions = [f"{word} is the {what} in the text above?" for what, _ in chosen]
    questions[0] = "\n\n" + questions[0]
    said = [f"The {what} is {value}." for what, value in chosen]
    what, value = chosen[-1]
    return Sample(
        task=task,
        document=document,
        question=questions[-1],
        answers=(value,),
        metric="string_match",
        max_tokens=48,
        turns=tuple(zip(questions[:-1], said, strict=False)),
        lead=f"The {what} is",
    )
