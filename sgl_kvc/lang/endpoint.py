"""Programs on a server: SGLang's `RuntimeEndpoint`, which also sends knobs and keeps reports."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sglang.global_config import global_config
from sglang.lang.backend import runtime_endpoint
from sglang.lang.choices import ChoicesDecision, ChoicesSamplingMethod
from sglang.lang.ir import SglSamplingParams
from sglang.utils import http_request

from sgl_kvc.lang.knob import NOT_GIVEN, OFF, Knob, checked, current
from sgl_kvc.spec import CUSTOM_PARAM

#: Tokens before a seam that are read anew: SGLang scores choices from there, since tokens may merge
#: where one text ends and another begins.
_SEAM = 2
#: Fields of a knob that say by themselves what is compressed when, or that want a copy.
_OWN_WAY = ("question_tokens", "question", "on_pressure", "recompress_every", "reuse", "explain")
_PROBABILITIES = (
    "return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs",
)  # fmt: skip


class RuntimeEndpoint(runtime_endpoint.RuntimeEndpoint):
    """``sglang.RuntimeEndpoint`` for a gateway, a worker or a ``sglang.Runtime``'s URL.

    It sends the knob, and puts the report into ``state.get_meta_info(name)["kv_compression"]``:
    an object; a list of them for ``n > 1``, and for each choice of a `select`.

    Parameters
    ----------
    kv_compression : the knob of what has none, instead of the server's default; None is off.
    *args, **kwargs : SGLang's.
    """

    def __init__(self, *args: Any, kv_compression: Knob | None = NOT_GIVEN, **kwargs: Any):
        self.kvc_knob = None if kv_compression is NOT_GIVEN else checked(kv_compression)
        super().__init__(*args, **kwargs)
        #: Servers of this SGLang have no `concate_and_append_request`; texts are joined instead.
        self.support_concate_and_append = False

    @property
    def endpoint(self) -> RuntimeEndpoint:
        """The backend of a program that begins here, which remembers the context's knob.

        SGLang asks for it in the caller's thread; `run_batch` then runs programs in others,
        which know nothing of the context.
        """
        knob = current()
        if knob is None:
            return self
        remembers = copy.copy(self)
        remembers.kvc_knob = knob
        return remembers

    # ---------------------------------------------------------- what differs between servers

    def _post(self, data: dict[str, Any]) -> Any:
        """The answer of ``/generate``, or the list of them. Raises RuntimeError."""
        res = http_request(
            f"{self.base_url}/generate", json=data, api_key=self.api_key, verify=self.verify
        )
        self._assert_success(res)
        return res.json()

    def _post_stream(self, data: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a stream. Raises RuntimeError."""
        res = http_request(
            f"{self.base_url}/generate", json=data, stream=True, api_key=self.api_key,
            verify=self.verify,
        )  # fmt: skip
        with contextlib.closing(res):
            self._assert_success(res)
            for line in res.iter_lines():
                if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                    yield json.loads(line[5:])

    def _count(self, texts: Sequence[str]) -> list[int]:
        """Tokens of each text. Raises RuntimeError."""
        res = http_request(
            f"{self.base_url}/tokenize", json={"prompt": list(texts)}, api_key=self.api_key,
            verify=self.verify,
        )  # fmt: skip
        if res.status_code == 200:
            return res.json()["count"]
        # a router may have no tokenizer
        answers = self._post({"text": list(texts), "sampling_params": {"max_new_tokens": 0}})
        return [each["meta_info"]["prompt_tokens"] for each in answers]

    # ------------------------------------------------------------------- what programs ask for

    def generate(self, s: Any, sampling_params: SglSamplingParams) -> tuple[Any, Any]:
        """Text and meta info, or lists of them for ``n > 1``. Raises RuntimeError."""
        knob = self._knob(s)
        answer = self._post(self._body(s, sampling_params, knob))
        for each in answer if isinstance(answer, list) else [answer]:
            _check_arrived(each, knob)
        if isinstance(answer, list):
            return [each["text"] for each in answer], list(map(_meta_info, answer))
        return answer["text"], _meta_info(answer)

    def generate_stream(
        self, s: Any, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, Any]]:
        """Pieces of text, each with the meta info so far; the last one has the report."""
        knob = self._knob(s)
        told: dict[str, Any] = {}
        position = 0
        for event in self._post_stream(self._body(s, sampling_params, knob) | {"stream": True}):
            if "error" in event:
                raise RuntimeError(event["error"])
            piece = event["text"][position:]
            position += len(piece)
            told = event
            yield piece, _meta_info(event)
        _check_arrived(told, knob)

    def select(
        self, s: Any, choices: list[str], temperature: float, choices_method: ChoicesSamplingMethod
    ) -> ChoicesDecision:
        """The likeliest choice. With a knob, what stands before the choices is compressed."""
        s.kvc_reports = None
        decision = super().select(s, choices, temperature, choices_method)
        if s.kvc_reports is not None:
            decision.meta_info = (decision.meta_info or {}) | {CUSTOM_PARAM: s.kvc_reports}
        return decision

    def cache_prefix(self, prefix_str: str) -> None:
        self._post(_nothing_decoded(prefix_str))

    def commit_lazy_operations(self, s: Any) -> None:
        self._generate_http_request(s, _nothing_decoded(s.text_))

    fill_image = commit_lazy_operations

    # ------------------------------------------------------------------------------- helpers

    def _knob(self, s: Any) -> Knob | None:
        """The knob for the state's text."""
        knob = self._in_force()
        if knob is not None and (shared := _shared(s, knob)) is not None:
            (knob,) = self._read_behind(shared, [s.text_], knob)
        return knob

    def _in_force(self) -> Knob | None:
        knob = current()
        return self.kvc_knob if knob is None else knob

    def _read_behind(self, before: str, texts: Sequence[str], knob: Knob) -> list[Knob]:
        """For each text the knob by which `before`, its beginning, is compressed, and no more."""
        first, *whole = self._count([before, *texts])
        compressed = first - _SEAM - (knob.get("question_tokens") or 0)
        return [{**knob, "question_tokens": tokens - compressed} for tokens in whole]

    def _body(
        self, s: Any, sampling_params: SglSamplingParams, knob: Knob | None
    ) -> dict[str, Any]:
        self._handle_dtype_to_regex(sampling_params)
        sampling = {
            "skip_special_tokens": global_config.skip_special_tokens_in_output,
            "spaces_between_special_tokens": global_config.spaces_between_special_tokens_in_out,
            **sampling_params.to_srt_kwargs(),
        }
        told = {name: getattr(sampling_params, name, None) for name in _PROBABILITIES}
        data = {"text": s.text_, "sampling_params": _with_knob(sampling, knob)}
        data |= {name: value for name, value in told.items() if value is not None}
        self._add_images(s, data)
        return data

    def _generate_http_request(self, s: Any, data: dict[str, Any]) -> Any:
        """What `select` sends: the prompt alone, then with each of the choices behind it."""
        knob, texts = self._in_force(), data.get("text")
        self._add_images(s, data)
        if knob is None or knob == OFF or not isinstance(texts, list):
            return self._post(data)
        shared = _shared(s, knob)
        knobs = self._read_behind(s.text_ if shared is None else shared, texts, knob)
        sampling = data["sampling_params"] | {"max_new_tokens": 1}  # the report comes with it
        answer = self._post(data | {"sampling_params": [_with_knob(sampling, k) for k in knobs]})
        for each in answer:
            _check_arrived(each, knob)
        s.kvc_reports = [each[CUSTOM_PARAM] for each in answer]
        return answer


def _shared(s: Any, knob: Knob) -> str | None:
    """What a branch of a fork shares with the others, where that alone is to be compressed.

    None where most of the text is the branch's own, and where the knob says what to compress.
    """
    own_way = knob == OFF or s.images_ or any(field in knob for field in _OWN_WAY)
    if own_way or not s.kvc_shared or 2 * s.kvc_shared < len(s.text_):
        return None
    return s.text_[: s.kvc_shared]


def _with_knob(sampling: Mapping[str, Any], knob: Knob | None) -> dict[str, Any]:
    """Sampling parameters with the knob where a worker and the gateway look for it."""
    return dict(sampling) | ({} if knob is None else {"custom_params": {CUSTOM_PARAM: dict(knob)}})


def _nothing_decoded(text: str) -> dict[str, Any]:
    return {"text": text, "sampling_params": {"max_new_tokens": 0}}


def _meta_info(answer: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's, with the report if it is there."""
    report = answer.get(CUSTOM_PARAM)
    return answer["meta_info"] | ({} if report is None else {CUSTOM_PARAM: report})


def _check_arrived(answer: Mapping[str, Any], knob: Knob | None) -> None:
    """Raise RuntimeError where a knob was sent and a server without the plugin ignored it."""
    if knob not in (None, OFF) and answer.get(CUSTOM_PARAM) is None:
        raise RuntimeError("the server ignored kv_compression: it does not run with sgl-kvc")
