"""Which part of a prompt is compressed, to how many blocks, or why it is not."""

from __future__ import annotations

import dataclasses

from sgl_kvc.spec.compression import CompressionSpec


@dataclasses.dataclass(frozen=True)
class Extent:
    """A prompt's geometry under a knob. Made by `Extent.of`, known before any score::

        [ 0 ...... begin )  [ begin ...... end )  [ end ...... prompt_tokens )
          prefix, whole       compressed to         tail: last partial block,
          and shared          segment_blocks        and the question

    Attributes
    ----------
    page_size : tokens of a block, P.
    prompt_tokens : tokens that the prefill processes.
    begin : where compression begins, a multiple of P: `prefix_tokens` rounded down. What lies
        before is kept whole and stays shared.
    end : where the compressed blocks end, a multiple of P (S in docs/design.md).
    scored : tokens that the scores cover: `prompt_tokens`, or `end` where what follows is read
        after compression (a question; all there is, where nothing is compressed before decode).
    segment_blocks : blocks that the knob compresses [begin, end) to, from 1 to
        ``(end - begin) / P``; 0 where that is 0.
    match_limit : tokens that may come from the prefix cache. The queries that the scorer looks at
        have to be computed: the last window, or all. `prompt_tokens` if it is not compressed.
    match_limit_with_states : the same where the cache remembers what a scorer that looks at all
        queries saw of this prompt.
    skipped : why the prompt is not compressed as asked, a sentence; None if it is, or if nothing
        was asked for.
    compressed : whether the prompt is compressed after prefill.
    prefill_block : tokens, whole blocks, after which it is compressed already while it is
        prefilled; 0 if it is not.
    """

    page_size: int
    prompt_tokens: int
    begin: int
    end: int
    scored: int
    segment_blocks: int
    match_limit: int
    match_limit_with_states: int
    skipped: str | None
    compressed: bool
    prefill_block: int = 0

    @classmethod
    def of(
        cls,
        spec: CompressionSpec,
        prompt_tokens: int,
        page_size: int,
        *,
        unable: str | None = None,
    ) -> Extent:
        """The extent of a prompt.

        Parameters
        ----------
        prompt_tokens : tokens that the prefill processes, at least 0.
        unable : why the engine cannot compress this request; it becomes `skipped`.
        """
        end = max(0, prompt_tokens - spec.question_tokens) // page_size * page_size
        begin = min(spec.prefix_tokens // page_size * page_size, end)
        blocks = (end - begin) // page_size
        skipped = None
        if not spec.off:
            skipped = unable or _reason_to_skip(spec, prompt_tokens, blocks, page_size)
        compressed = not spec.off and skipped is None
        scored = end if spec.question_tokens or not blocks else prompt_tokens
        limit = max(0, scored - spec.window) if compressed else prompt_tokens
        bounded = compressed and spec.prefill_block > 0 and blocks > 0
        if bounded:  # nothing compressed is taken from the cache, and nothing else is held
            limit = min(limit, begin)
        return cls(
            page_size=page_size,
            prompt_tokens=prompt_tokens,
            begin=begin,
            end=end,
            scored=scored,
            segment_blocks=spec.blocks_for(blocks, page_size) if blocks else 0,
            match_limit=0 if compressed and spec.all_queries and not bounded else limit,
            match_limit_with_states=limit,
            skipped=skipped,
            compressed=compressed,
            prefill_block=_blocks(spec.prefill_block, page_size) * page_size if bounded else 0,
        )

    @property
    def cut(self) -> int | None:
        """Where the prefill has to stop, to compress before the rest is read; None: nowhere."""
        cuts = self.compressed and 0 < self.end == self.scored < self.prompt_tokens
        return self.end if cuts else None

    def next_cut(self, done: int) -> int | None:
        """Where the prefill has to stop next, of which `done` tokens are there; None: nowhere.

        With `prefill_block` where compression begins, and from then on after every so many tokens,
        counted from the end, so that the last ones are as many as the others::

            [ 0 . . begin )[ . . budget + less than a block )[ block )[ block ) . . [ block end )
        """
        if not self.prefill_block:
            return self.cut if self.cut is not None and done < self.cut else None
        if done < self.begin:
            return self.begin
        after = max(done, self.begin + self.segment_blocks * self.page_size)
        left = (self.end - after - 1) // self.prefill_block  # cuts behind `after`, before the end
        if left > 0:
            return self.end - left * self.prefill_block
        return self.cut if self.cut is not None and done < self.cut else None

    @property
    def bound(self) -> int:
        """Blocks that the prompt holds at most while it is prefilled, with `prefill_block`.

        Those before `begin` included.
        """
        begin, page = self.begin // self.page_size, self.page_size
        tail = max(self.prefill_block // page + 1, _blocks(self.prompt_tokens - self.end, page))
        return min(_blocks(self.prompt_tokens, page), begin + self.segment_blocks + tail)

    def tail_blocks(self, tokens: int) -> int:
        """Blocks of the tail once prompt and output are `tokens`; all of them if not compressed."""
        tail = tokens - self.end if self.compressed else tokens
        return _blocks(tail, self.page_size)


def _blocks(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def _reason_to_skip(
    spec: CompressionSpec, prompt_tokens: int, blocks: int, page_size: int
) -> str | None:
    """Why `blocks` whole blocks cannot be compressed as asked; None when they can.

    With `recompress_every`, a prompt that has nothing to remove yet still gets blocks of its own,
    since those it shares cannot be compressed later; not under pressure.
    """
    if spec.recompress_every and not spec.on_pressure:
        return None
    if prompt_tokens < spec.min_tokens:
        return (
            f"the prompt's {prompt_tokens} tokens are fewer than min_tokens ({spec.min_tokens})"
        )
    if blocks and spec.blocks_for(blocks, page_size) < blocks:
        return None
    what = {
        (False, False): "the prompt",
        (False, True): "what comes before the question",
        (True, False): "what follows prefix_tokens",
        (True, True): "what lies between prefix_tokens and the question",
    }[spec.prefix_tokens > 0, spec.question_tokens > 0]
    return f"nothing to remove: {what} fills {blocks} whole blocks of {page_size} tokens"
