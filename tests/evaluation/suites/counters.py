"""An endpoint's way to count tokens, without the endpoint."""

from __future__ import annotations


class WordCounter:
    """An endpoint whose tokens are characters in threes, and a frame of 11."""

    async def count_tokens(self, text: str) -> int:
        return 11 + len(text) // 3
