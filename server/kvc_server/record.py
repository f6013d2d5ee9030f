"""What is known of one request: what the access log tells and metrics count.

Never a prompt, an answer or a key: a record has no field that could hold one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from datetime import datetime, timezone
from typing import Any

#: The status of a request whose client left before it had one.
CLIENT_GONE = "499"


@dataclasses.dataclass
class Record:
    """One request, as the access log tells it.

    Attributes
    ----------
    id : the client's `X-Request-Id`, or one of ours.
    endpoint : the path's name, one of few.
    tenant : the name of its key; None where there are no keys.
    first_s : seconds to the first byte of a stream; None if it is none.
    results : the `kv_compression` objects of its answer, once it has come to its end.
    complete : whether its answer came to its end.
    knob_lost : whether the knob did not reach the worker.
    held : what the request holds of limits, let go when it is over, before its client can know.
    """

    id: str
    method: str
    endpoint: str
    tenant: str | None = None
    status: str = CLIENT_GONE
    stream: bool = False
    seconds: float = 0.0
    first_s: float | None = None
    results: list[Any] = dataclasses.field(default_factory=list)
    complete: bool = False
    knob_lost: bool = False
    held: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    def to_json(self) -> str:
        """The line of the log."""
        fields: dict[str, Any] = {
            "time": datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
            "request_id": self.id,
            "tenant": self.tenant,
            "method": self.method,
            "endpoint": self.endpoint,
            "status": int(self.status),
            "stream": self.stream,
            "complete": self.complete,
            "seconds": round(self.seconds, 4),
            "first_seconds": None if self.first_s is None else round(self.first_s, 4),
        }
        if self.knob_lost:
            fields["knob_lost"] = True
        if self.results:
            fields |= _compression(self.results)
        return json.dumps(fields)


def _compression(results: list[Any]) -> dict[str, Any]:
    """What the choices' reports tell together; the policy and rate are those of the first."""
    told = [result for result in results if isinstance(result, dict)]
    first = told[0] if told else {}

    def total(*path: str) -> int:
        return sum(_number(result, *path) for result in told)

    return {
        "choices": len(told),
        "rate": _scalar(first.get("rate")),
        "rate_achieved": _scalar(first.get("rate_achieved")),
        "policy": first.get("policy") if isinstance(first.get("policy"), str) else None,
        "skipped": sum(1 for result in told if result.get("skipped")),
        "prompt_tokens": total("prompt_tokens"),
        "completion_tokens": total("completion_tokens"),
        "bytes_before": total("bytes", "before"),
        "bytes_after": total("bytes", "after"),
    }


def _number(value: Any, *path: str) -> int:
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, int) and value >= 0 else 0


def _scalar(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) else None
