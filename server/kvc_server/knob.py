"""Where a request's compression knob comes from, and where the worker looks for it.

Pure functions from one request body to the next; validation itself is `sgl_kvc.spec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvc_server import elastic
from kvc_server.errors import ApiError
from kvc_server.settings import Settings
from sgl_kvc.spec import CUSTOM_PARAM, PIN_PARAM, CompressionSpec, SpecError, parse

HEADER = "X-KV-Compression-Rate"
OFF = {"rate": 1}


def place(
    body: dict[str, Any], header: Sequence[str], *, native: bool, settings: Settings
) -> dict[str, Any]:
    """The body to send to the worker: the knob validated and moved to ``custom_params``.

    Of `elastic`, the field that is the gateway's own, the knob then holds an `Elastic`, which
    `settle` takes out.

    A request says what it wants in one place: the field ``kv_compression``, the header, or
    ``custom_params.kv_compression``. Without any, the server's default rate applies.

    Parameters
    ----------
    body : the parsed request; not mutated, everything but the knob is carried over as it is.
    header : the values of `HEADER`, none when the client did not send it.
    native : True for SGLang's ``/generate``, whose ``sampling_params`` (absent, an object, or
        one object per prompt of a batch) hold the ``custom_params``.

    Raises
    ------
    ApiError : status 400, naming the field or the header.
    """
    body, given = _taken(body, header, settings)
    if not native:
        return _with_knob(body, given, "", settings)
    sampling = body.get("sampling_params")
    if isinstance(sampling, list):
        body["sampling_params"] = [
            _with_knob(item, given, f"sampling_params.{index}.", settings)
            for index, item in enumerate(sampling)
        ]
    else:
        sampling = {} if sampling is None else sampling
        body["sampling_params"] = _with_knob(sampling, given, "sampling_params.", settings)
    return body


def take(
    body: dict[str, Any], header: Sequence[str], settings: Settings
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Like `place`, for endpoints without ``custom_params``: the body without a knob, and the knob.

    Raises
    ------
    ApiError : status 400, naming the field or the header.
    """
    body, given = _taken(body, header, settings)
    custom = body.get("custom_params")
    if isinstance(custom, dict) and CUSTOM_PARAM in custom:
        where = f"custom_params.{CUSTOM_PARAM}"
        raise _bad(where, f"{where}: this endpoint has no custom_params; give {CUSTOM_PARAM}")
    return body, _default(settings) if given is None else given


def _taken(
    body: dict[str, Any], header: Sequence[str], settings: Settings
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A copy of the body without its field `CUSTOM_PARAM`, and the knob of that or the header."""
    body = dict(body)
    if CUSTOM_PARAM in body:
        given = _validated(body.pop(CUSTOM_PARAM), CUSTOM_PARAM, settings)
        if header:
            raise _bad(HEADER, f"give either the header {HEADER} or {CUSTOM_PARAM}, not both")
        return body, given
    if header:
        return body, _validated({"rate": _number(header)}, HEADER, settings)
    return body, None


def _default(settings: Settings) -> dict[str, Any]:
    """The knob of a request that names none."""
    limits = settings.knob_limits
    rate = limits.force_rate or max(settings.default_rate, limits.min_rate)
    return OFF if rate == 1 else {"rate": rate}


def _with_knob(
    holder: Any, given: dict[str, Any] | None, path: str, settings: Settings
) -> dict[str, Any]:
    """A copy of `holder` with the knob under ``custom_params``; `path` is where it stands."""
    if not isinstance(holder, dict):
        raise _bad(path.rstrip("."), f"{path.rstrip('.')} must be an object")
    custom = holder.get("custom_params")
    custom = {} if custom is None else custom
    if not isinstance(custom, dict):
        raise _bad(f"{path}custom_params", f"{path}custom_params must be an object")
    custom = {name: value for name, value in custom.items() if name != PIN_PARAM}  # documents.py's
    if CUSTOM_PARAM in custom:
        where = f"{path}custom_params.{CUSTOM_PARAM}"
        if given is not None:
            raise _bad(where, f"{where}: the rate is given twice; leave this one out")
        given = _validated(custom[CUSTOM_PARAM], where, settings)
    given = _default(settings) if given is None else given
    return holder | {"custom_params": custom | {CUSTOM_PARAM: given}}


def _validated(knob: Any, where: str, settings: Settings) -> dict[str, Any]:
    limits = settings.knob_limits
    try:
        knob, wish = elastic.split(knob)
        spec: CompressionSpec = parse(knob, max_rate=settings.max_rate)
        bounds = elastic.checked(wish, spec, settings.max_rate)
        spec = limits.check(spec)
    except SpecError as error:
        field = where if where == HEADER else error.at(where)
        raise _bad(field, f"{field}: {error.problem}") from None
    if bounds is not None and limits.force_rate is None:
        return spec.to_json() | {elastic.FIELD: bounds}
    return OFF if spec.off and not spec.hold_s else spec.to_json()


def settle(
    knobs: Sequence[dict[str, Any]], rate: float | None
) -> tuple[tuple[CompressionSpec, ...], elastic.Elastic | None]:
    """Make knobs that `place` or `take` left what the worker gets: what was asked, and `elastic`.

    Parameters
    ----------
    knobs : of one request; mutated.
    rate : which they are raised to; None leaves them as they are.

    Raises
    ------
    ApiError : status 400 for several knobs of which one is elastic.
    """
    found = [bounds for each in knobs if (bounds := each.pop(elastic.FIELD, None)) is not None]
    if found and len(knobs) > 1:
        where = f"{CUSTOM_PARAM}.{elastic.FIELD}"
        raise _bad(where, f"{where}: give one knob for all prompts beside it")
    specs = tuple(map(parse, knobs))
    for each in knobs if rate is not None else ():
        each["rate"] = rate
    return specs, found[0] if found else None


def _number(header: Sequence[str]) -> float:
    try:
        (text,) = header
        if "_" in text:
            raise ValueError
        return float(text)
    except ValueError:
        raise _bad(
            HEADER, f"{HEADER}: must be one number such as 8 (got {', '.join(header)!r})"
        ) from None


def _bad(param: str, message: str) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_kv_compression")
