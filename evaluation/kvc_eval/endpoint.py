"""The HTTP side of an evaluation: what an endpoint can do, and many prompts asked of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
from kvc_server.generate import sampling_params

from kvc_eval.sample import Sample, message
from sgl_kvc.spec import CUSTOM_PARAM

TRIES = 3
_CHAT = "/v1/chat/completions"
_TOKENIZE = "/v1/tokenize"
_WAIT_S = 0.5  # before the second try; four times as long before each further one
_AGAIN = (408, 429)  # and all from 500
_HELLO = [message("user", "hello ?")]


class RequestFailed(Exception):
    """No answer, after all tries. `status` is the HTTP status, None when there was none."""

    def __init__(self, message: str, status: int | None = None):
        super().__init__(message)
        self.status = status


@dataclasses.dataclass(frozen=True)
class Question:
    """A prompt and the ``kv_compression`` it is asked with; None sends none."""

    sample: Sample
    knob: dict[str, Any] | None


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came back.

    Attributes
    ----------
    before, after : bytes that the prompt held in the pool, None where it is not told.
    tokens_right, log_likelihood : of an answer that was given, not decoded: see `forced.py`.
    """

    text: str
    prompt_tokens: int | None
    before: int | None
    after: int | None
    skipped: str | None
    tokens_right: float | None = None
    log_likelihood: float | None = None


class Endpoint:
    """An OpenAI-compatible server. Use it as an async context manager.

    Parameters
    ----------
    url : with or without the final ``/v1``.
    model : None takes the first of ``/v1/models``.
    timeout : seconds of silence before a request is given up and tried again.

    Attributes
    ----------
    compresses : whether it is ours, and may be told how to compress; set by `probe`.
    """

    def __init__(self, url: str, model: str | None, api_key: str | None, timeout: float):
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model or ""
        self.compresses = False
        self._tokenizes = True
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def probe(self) -> None:
        """Find the model's name, and whether the endpoint compresses. Raises RequestFailed."""
        if not self.model:
            models = await self._request("GET", "/v1/models")
            with expected("/v1/models"):
                self.model = models["data"][0]["id"]
        answer = await self._request("POST", _CHAT, self._chat(_HELLO, 1))
        with expected(_CHAT):
            _ = answer["choices"][0]
        self.compresses = CUSTOM_PARAM in answer

    async def policies(self) -> list[str] | None:
        """Names of ``GET /v1/kv_policies``; None where there is no such path."""
        try:
            listed = await self._request("GET", "/v1/kv_policies")
        except RequestFailed as error:
            if error.status in (404, 405):
                return None
            raise
        with expected("/v1/kv_policies"):
            return [policy["name"] for policy in listed["policies"]]

    async def refusal(self, knob: dict[str, Any]) -> str | None:
        """Why the endpoint refuses a knob; None when it takes it. Raises RequestFailed."""
        body = self._chat(_HELLO, 1) | {CUSTOM_PARAM: knob}
        try:
            await self._request("POST", _CHAT, body)
        except RequestFailed as error:
            if error.status == 400:
                return str(error)
            raise
        return None

    async def count_tokens(self, text: str) -> int:
        """Prompt tokens of `text` as a user message, the chat template's included."""
        body = self._chat([message("user", text)], 1)
        if self.compresses:
            body[CUSTOM_PARAM] = {"rate": 1}
        answer = await self._request("POST", _CHAT, body)
        with expected(_CHAT):
            return answer["usage"]["prompt_tokens"]

    async def token_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """A chat as the model sees it; what the assistant says last is not ended.

        Only of endpoints that compress. SGLang's ``/v1/tokenize`` fails for a tokenizer that has
        no longest text; then a chat completion tells. Raises RequestFailed.
        """
        more: dict[str, Any] = {"continue_final_message": messages[-1]["role"] == "assistant"}
        if self._tokenizes:
            try:
                body = {"model": self.model, "messages": messages}
                answer = await self._request("POST", _TOKENIZE, body | more)
            except RequestFailed:
                self._tokenizes = False
            else:
                with expected(_TOKENIZE):
                    return list(answer["tokens"])
        more |= {"return_prompt_token_ids": True, CUSTOM_PARAM: {"rate": 1}}
        answer = await self._request("POST", _CHAT, self._chat(messages, 1) | more)
        with expected(_CHAT):
            return list(answer["choices"][0]["prompt_token_ids"])

    async def head(self) -> list[int]:
        """The tokens of a short chat: what comes before every user message, and a little more."""
        return await self.token_ids(_HELLO)

    async def ask(self, question: Question) -> Answer:
        """One greedy chat completion. Raises RequestFailed."""
        body = self._chat(question.sample.messages, question.sample.max_tokens)
        if question.knob is not None:
            body[CUSTOM_PARAM] = question.knob
        answer = await self._request("POST", _CHAT, body)
        with expected(_CHAT):
            text = answer["choices"][0]["message"]["content"] or ""
            tokens = (answer.get("usage") or {}).get("prompt_tokens")
            return answer_from(text, tokens, answer.get(CUSTOM_PARAM))

    async def ask_many(self, questions: Sequence[Question]) -> list[Answer]:
        """All at once with SGLang's own ``/generate``. Raises RequestFailed for all of them.

        Every sample has to have a `prompt`, and the endpoint has to compress.
        """
        body = {
            "text": [question.sample.prompt for question in questions],
            "sampling_params": [
                sampling_params(question.knob, max_new_tokens=question.sample.max_tokens)
                for question in questions
            ],
        }
        answers = await self.generate(body)
        with expected("/generate"):
            return [
                answer_from(one["text"], one["meta_info"]["prompt_tokens"], one[CUSTOM_PARAM])
                for one in answers
            ]

    async def generate(self, body: dict[str, Any]) -> Any:
        """What SGLang's own ``/generate`` answers. Raises RequestFailed."""
        return await self._request("POST", "/generate", body)

    def _chat(self, messages: list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
        }

    async def _request(self, method: str, path: str, body: dict | None = None) -> Any:
        """The JSON answered, after `TRIES` tries of what may pass by itself."""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(_WAIT_S * 4 ** (attempt - 1))
            try:
                answer = await self._client.request(method, path, json=body)
                if answer.status_code == 200:
                    return answer.json()
            except (httpx.HTTPError, ValueError) as error:
                failure = RequestFailed(f"{self.url}{path}: {error!r}")
                continue
            failure = RequestFailed(_told(answer), answer.status_code)
            if answer.status_code < 500 and answer.status_code not in _AGAIN:
                break
        raise failure


def answer_from(text: str, tokens: int | None, report: dict[str, Any] | None) -> Answer:
    """An answer and what the endpoint reports of its compression."""
    if report is None:
        return Answer(text, tokens, None, None, None)
    held = report["bytes"]
    return Answer(text, tokens, held["before"], held["after"], report["skipped"])


@contextlib.contextmanager
def expected(path: str) -> Iterator[None]:
    """Turn what reading an answer of another shape raises into RequestFailed."""
    try:
        yield
    except (KeyError, IndexError, TypeError) as error:
        raise RequestFailed(f"{path} answers in a shape we do not know: {error!r}") from None


def _told(answer: httpx.Response) -> str:
    """What the endpoint says of its error, in one line of readable length."""
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text
    return f"HTTP {answer.status_code}: {' '.join(str(message).split())[:300]}"
