"""Programs on a ``sglang.Engine`` in this process, without a server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Generator, Sequence
from typing import Any

from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.chat_template import get_chat_template, get_chat_template_by_model_path
from sglang.srt.managers.io_struct import GenerateReqInput

from sgl_kvc.lang.endpoint import RuntimeEndpoint
from sgl_kvc.lang.knob import NOT_GIVEN, Knob, checked


class EngineBackend(RuntimeEndpoint):
    """A ``sglang.Engine`` of this process as the backend of programs.

    The engine's event loop runs in a thread from here on, unless it runs already. Until `close`
    the engine's own ``generate()`` therefore has to be ``async_generate()`` on that loop.

    Parameters
    ----------
    chat_template_name : SGLang's; None is the one that goes with the model's path.
    kv_compression : as `RuntimeEndpoint`'s.
    """

    def __init__(
        self,
        engine: Any,
        chat_template_name: str | None = None,
        kv_compression: Knob | None = NOT_GIVEN,
    ):
        BaseBackend.__init__(self)
        self.kvc_knob = None if kv_compression is NOT_GIVEN else checked(kv_compression)
        self._engine = engine
        self.model_info = {"model_path": engine.server_args.model_path}
        self.chat_template = (
            get_chat_template(chat_template_name)
            if chat_template_name
            else get_chat_template_by_model_path(self.get_model_name())
        )
        self._thread: threading.Thread | None = None
        if not engine.loop.is_running():
            self._thread = threading.Thread(target=engine.loop.run_forever, daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Give the event loop back. Idempotent."""
        if self._thread is not None:
            self._engine.loop.call_soon_threadsafe(self._engine.loop.stop)
            self._thread.join()
            self._thread = None

    def __enter__(self) -> EngineBackend:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def flush_cache(self) -> None:
        self._wait(self._engine.tokenizer_manager.flush_cache())

    def get_server_info(self) -> Any:
        return dataclasses.asdict(self._engine.server_args)

    def _count(self, texts: Sequence[str]) -> list[int]:
        return [len(self._engine.tokenizer_manager.tokenizer.encode(text)) for text in texts]

    def _post(self, data: dict[str, Any]) -> Any:
        with contextlib.closing(self._post_stream(data)) as answers:
            return next(answers)

    def _post_stream(self, data: dict[str, Any]) -> Generator[Any, None, None]:
        answers = self._engine.tokenizer_manager.generate_request(GenerateReqInput(**data), None)
        try:
            while True:
                try:
                    yield self._wait(anext(answers))
                except StopAsyncIteration:
                    return
        finally:
            self._wait(answers.aclose())

    def _wait(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._engine.loop).result()
