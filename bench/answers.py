"""Answers under compression, prompt by prompt: a file of records that a run can go on with."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class Records:
    """What is known of prompts and of knobs on them, in a file of JSON lines or in memory.

    Parameters
    ----------
    file : read first, if it is there, then appended to; None keeps records in memory alone.
    """

    def __init__(self, file: Path | None):
        self._file, self._known = file, {}
        if file is not None and file.is_file():
            for line in file.read_text().splitlines():
                key, value = json.loads(line)
                self._known[json.dumps(key)] = value

    def __contains__(self, key: Any) -> bool:
        return json.dumps(key) in self._known

    def __getitem__(self, key: Any) -> Any:
        return self._known[json.dumps(key)]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._known[json.dumps(key)] = value
        if self._file is not None:
            with self._file.open("a") as out:
                out.write(json.dumps([key, value]) + "\n")


def grade(tokenizer: Any, said: Sequence[int], answer: str, got: dict[str, list[int]]) -> dict:
    """How one answer compares with what the uncompressed model said, right and no longer.

    Parameters
    ----------
    got : from `MaskedModel.answer`.

    Returns
    -------
    right : whether the answer is in what was generated.
    same : whether it was generated in the very same words.
    forced : of the tokens that spell the answer, the share that is predicted where all before
        them are the uncompressed model's.
    """
    begin = tokenizer.decode(said).index(answer)
    ends = [len(tokenizer.decode(said[: i + 1])) for i in range(len(said))]
    spelled = [i for i, end in enumerate(ends) if end > begin]
    hits = sum(said[i] == got["forced"][i] for i in spelled)
    return {
        "right": answer in tokenizer.decode(got["generated"]),
        "same": list(said) == got["forced"],
        "forced": round(hits / len(spelled), 4),
    }


def interval(count: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z, share = 1.96, count / of
    middle = share + z * z / (2 * of)
    half = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return (middle - half) / (1 + z * z / of), (middle + half) / (1 + z * z / of)


def line(knob: dict, grades: Sequence[dict]) -> str:
    """A row of the table: right with its interval, the same words, tokens right when forced."""
    n, right = len(grades), sum(each["right"] for each in grades)
    low, high = interval(right, n)
    same = sum(each["same"] for each in grades) / n
    forced = sum(each["forced"] for each in grades) / n
    return f"{right / n:.3f} [{low:.2f}, {high:.2f}]  {same:.2f}  {forced:.3f}  {json.dumps(knob)}"
