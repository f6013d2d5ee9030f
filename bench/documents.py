"""English documents with numbers hidden in them, for small models of language."""

from __future__ import annotations

from random import Random

PLACES = ["Ostrava", "Lindholm", "Marabel", "Quentin", "Tavira", "Belgard", "Hollis", "Nerida"]
FILLER = [
    "The market opened early and the traders shouted over the noise of the carts.",
    "Rain fell on the harbour while the fishermen mended their nets in silence.",
    "A committee met to discuss the new road, but nobody could agree on the route.",
    "The old clock in the square had stopped at half past four many years ago.",
    "Children ran along the river bank, chasing a dog that had stolen a loaf of bread.",
]


def numbers(seed: int, tokens: int = 1024) -> tuple[str, str, str]:
    """Document, question and answer: four numbers of five digits, one of which is asked for.

    Parameters
    ----------
    tokens : of the prompt in SmolLM2's vocabulary and chat template, within a few per cent.
    """
    rng = Random(f"needles{seed}")
    text = [rng.choice(FILLER) for _ in range(max(1, (tokens - 120) // 16))]
    places = rng.sample(PLACES, 4)
    values = [str(rng.randint(10_000, 99_999)) for _ in places]
    for place, value in zip(places, values, strict=True):
        text.insert(rng.randint(0, len(text)), f"The special magic number for {place} is {value}.")
    question = (
        f"What is the special magic number for {places[0]} mentioned in the text? "
        "Answer with the number only."
    )
    return " ".join(text), question, values[0]
