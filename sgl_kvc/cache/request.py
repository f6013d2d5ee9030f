"""Everything sgl-kvc knows of one request: one object, which SGLang's ``Req`` holds as ``kvc``."""

from __future__ import annotations

import dataclasses
import hashlib
from array import array
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from sgl_kvc.cache.held_scores import HeldScores
from sgl_kvc.cache.segments import Namespace, StoredSegment
from sgl_kvc.cache.states import StateCache
from sgl_kvc.policy.facts import ModelFacts
from sgl_kvc.policy.scores import PromptScores
from sgl_kvc.pool.segment import Segment
from sgl_kvc.report import BoundedPrefill, Report
from sgl_kvc.spec import (
    CUSTOM_PARAM,
    OFF,
    PIN_PARAM,
    TIME_PARAM,
    CompressionSpec,
    Extent,
    SpecError,
    chained_digests,
    methods,
    parse,
)

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


@dataclasses.dataclass(frozen=True)
class Pin:
    """What is asked for in ``custom_params["kv_cache_pin"]``.

    Attributes
    ----------
    expires : when it will be released, seconds since 1970; None if nobody says.
    """

    expires: float | None = None

    @classmethod
    def of(cls, custom: Any) -> Pin | None:
        """From a request's ``custom_params``."""
        asked = custom.get(PIN_PARAM) if isinstance(custom, dict) else None
        if asked is None:
            return None
        expires = asked.get("expires") if isinstance(asked, dict) else None
        return cls(float(expires) if isinstance(expires, (int, float)) else None)


class Request:
    """One request's compression, from its admission to its end.

    Attributes
    ----------
    spec : the knob.
    pin : the request is there to pin the segment of its prompt; else None.
    arrived : when, in seconds since 1970; None if nobody has told.
    row : its row of ``req_to_token`` while it holds memory, else None.
    unusable : why the knob that was given cannot be used, and `spec` is off; else None.
    extent : what of the prompt is compressed, or why nothing is; set when it is first matched
        against the prefix cache, anew after a retraction.
    scores : of the prompt, while it is prefilled and until it is compressed.
    known : what the scorer saw of this prompt before, by layer, which allows more of it to come
        from the prefix cache; from the match until the prefill begins.
    states : what the scorer saw of the prompt, by layer, where it scores anew what is held in
        decode; else None.
    segment : what was kept of it; None while it is uncompressed.
    stored : the prefix cache's entry that `segment` is; None if the segment is the request's own.
    begun : tokens of the segment that it began with, of a turn that may; else None.
    found : the entry that it was last matched with; None if there was none.
    bounded : what its prefill has held at most, if that is bounded and has begun; else None.
    input_limit : tokens that its prompt may have, if that is more than the pool's; else None.
    counted_from : tokens that there were when decode began to count the attention that its KVs
        are paid; None while it does not.
    compressed_at : when it was last compressed, counted in the cache's compactions; else 0.
    report : what the response will tell; None before the prefill.
    block_digests : of every whole block of the prompt, chained, so that equal digests mean equal
        prefixes; empty while the request holds no memory.
    """

    def __init__(
        self, spec: CompressionSpec, unusable: str | None = None, pin: Pin | None = None
    ):
        self.spec = spec
        self.pin = pin
        self.unusable = unusable
        self.arrived: float | None = None
        self.row: int | None = None
        self.extent: Extent | None = None
        self.scores: PromptScores | HeldScores | None = None
        self.known: list[Any] | None = None
        self.states: list[Any] | None = None
        self.segment: Segment | None = None
        self.stored: StoredSegment | None = None
        self.found: StoredSegment | None = None
        self.begun: int | None = None
        self.bounded: BoundedPrefill | None = None
        self.input_limit: int | None = None
        self.counted_from: int | None = None
        self.compressed_at = 0
        self.report: Report | None = None
        self.block_digests: list[Hashable] = []
        self._states_key: tuple[int, tuple[Hashable, ...]] | None = None
        self._digests: list[Hashable] = []

    @classmethod
    def of(cls, req: Req) -> Request:
        """The request's own, made when it is first asked for. Never raises.

        SGLang's HTTP process refuses a bad knob (compat), but there are other ways in: a knob that
        cannot be used is as none, and the report says why.
        """
        found: Request | None = getattr(req, "kvc", None)
        if found is None:
            custom = req.sampling_params.custom_params
            knob = custom.get(CUSTOM_PARAM) if isinstance(custom, dict) else None
            try:
                spec = parse(knob)
                if spec.question is not None:
                    raise SpecError("question", "nobody has counted its tokens")
                found = cls(spec, pin=Pin.of(custom))
            except SpecError as error:
                found = cls(OFF, str(error))
            if isinstance(custom, dict) and isinstance(custom.get(TIME_PARAM), (int, float)):
                found.arrived = float(custom[TIME_PARAM])
            req.kvc = found
        return found

    @property
    def goes_on(self) -> bool:
        """Whether what it holds may be compressed again while it decodes."""
        return self.spec.goes_on and self.extent is not None and self.extent.compressed

    def shares_segment(self, req: Req) -> bool:
        """Whether requests with the same knob may read its segment, and it theirs.

        What is kept must follow from the tokens it stands for: not from a question behind them,
        nor from embeddings that came in their place. Who wants it explained makes its own:
        another's selection is not there any more.
        """
        if self.extent is None or self.extent.cut is None or self.goes_on or self.spec.explain:
            return False
        return req.positional_embed_overrides is None

    def reuses(self, req: Req) -> bool:
        """Whether it may begin with what a chat's turn before has left, and leaves its own."""
        if self.extent is None or not self.extent.compressed or not self.extent.segment_blocks:
            return False
        asked = self.spec.reuse in ("compressed", "both")
        return asked and req.positional_embed_overrides is None

    def waits_for_pressure(self, req: Req) -> bool:
        """Whether its prompt is there and will be compressed once memory is short."""
        if not self.spec.on_pressure or self.segment is not None or not isinstance(
            self.scores, PromptScores
        ):
            return False
        assert self.extent is not None
        prefilled = len(req.prefix_indices) >= self.extent.scored
        return prefilled and self.scores.complete and decodes(req)

    def namespace(self, req: Req, *, turn: bool = False) -> Namespace:
        """Whose segments it may read; those that a chat's turns have left, if `turn`."""
        assert self.extent is not None
        return Namespace(req.extra_key, self.extent.begin, self.spec.shape, turn)

    def digests(self, req: Req, page_size: int) -> Sequence[Hashable]:
        """`chained_digests` of what is compressed of its prompt."""
        assert self.extent is not None
        blocks = self.extent.end // page_size
        if len(self._digests) != blocks:
            self._digests = chained_digests(self.prompt(req)[: self.extent.end], None, page_size)
        return self._digests

    def prompt(self, req: Req) -> Sequence[int]:
        """Token ids that are prefilled, which is what the knob is about.

        After a retraction they include what was generated, unless a question is kept apart: it
        stays where it was.
        """
        if self.spec.question_tokens:
            return req.origin_input_ids
        return req.full_untruncated_fill_ids

    def measure(self, req: Req, page_size: int, unable: str | None, facts: ModelFacts) -> Extent:
        """The extent of the prompt as it stands now.

        Parameters
        ----------
        unable : why the engine cannot compress this request, if it cannot.
        """
        tokens = len(self.prompt(req))
        if self.extent is None or self.extent.prompt_tokens != tokens:
            unable = unable or missing_facts(self.spec, facts)
            self.extent = Extent.of(self.spec, tokens, page_size, unable=unable)
        return self.extent

    def states_key(self, req: Req) -> Hashable:
        """What the states of a scorer that looks at every query follow from."""
        assert self.extent is not None
        scored = self.extent.scored
        if self._states_key is None or self._states_key[0] != scored:
            digest = hashlib.blake2b(memoryview(array("q", self.prompt(req)[:scored]))).digest()
            parameters = tuple(sorted(self.spec.parameters.items()))
            scorer = (self.spec.scorer, parameters, self.spec.sinks)
            self._states_key = (scored, (scored, digest, req.extra_key, *scorer))
        return self._states_key[1]

    def known_states(self, req: Req, states: StateCache) -> list[Any] | None:
        """What is remembered of what its scorer saw of this prompt."""
        return states.get(self.states_key(req)) if self.spec.all_queries else None

    def remember_states(self, req: Req, states: StateCache) -> None:
        """What the scorer has seen of the prompt, for others of the same prompt."""
        scores = self.scores
        if self.spec.all_queries and scores is not None and scores.complete and scores.states:
            states.put(self.states_key(req), scores.states)

    def retract(self) -> None:
        """Forget everything that belongs to memory the request no longer holds."""
        self.row = self.extent = self.scores = self.known = self.states = self.segment = None
        self.stored = self.found = self.begun = self.bounded = self.counted_from = None
        self.compressed_at = 0
        self.block_digests = []


def missing_facts(spec: CompressionSpec, facts: ModelFacts) -> str | None:
    """What the policy of a request needs and the model has not, in a sentence."""
    for method in (methods("scorers")[spec.scorer], methods("apportioners")[spec.apportioner]):
        for need in method.needs:
            if getattr(facts, need) is None:
                return f"{method.name} needs the model's {need.replace('_', ' ')}; there is none"
    return None


def decodes(req: Req) -> bool:
    """Whether a decode step will read what `req` holds."""
    return req.sampling_params.max_new_tokens > 1


def shows_its_prompt(req: Req) -> bool:
    """Whether `req` decodes nothing but shows a prompt to a scorer that looks at every query.

    SGLang sends such a request before the copies of ``n > 1``; they will find the states.
    """
    return req.sampling_params.max_new_tokens == 0 and Request.of(req).spec.all_queries


def cannot_compress(req: Req, *, cached: bool) -> str | None:
    """Why no knob could have `req` compressed, in a sentence; None if one could.

    Parameters
    ----------
    cached : whether the server's prefix cache is on.
    """
    if not cached:
        return "the server's prefix cache is disabled"
    if req.session is not None:
        return "the request belongs to a session"
    spec = Request.of(req).spec
    reads = spec.question_tokens or spec.prefill_block
    if not (reads or decodes(req) or shows_its_prompt(req)):
        return "no token is decoded after the first one, so nothing would read what is kept"
    return None
