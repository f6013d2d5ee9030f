"""Bodies of SGLang's own ``/generate``, with the knob where the worker looks for it."""

from __future__ import annotations

from typing import Any

from sgl_kvc.spec import CUSTOM_PARAM


def sampling_params(knob: dict[str, Any] | None = None, **sampling: Any) -> dict[str, Any]:
    """Greedy sampling of 16 tokens, changed by `sampling`; no knob is sent for None."""
    params = {"temperature": 0, "max_new_tokens": 16} | sampling
    return params if knob is None else params | {"custom_params": {CUSTOM_PARAM: knob}}


def generate_body(
    prompt: Any, knob: dict[str, Any] | None = None, **sampling: Any
) -> dict[str, Any]:
    """The body for `prompt`: text, token ids, or a list of either."""
    batch = isinstance(prompt, list) and isinstance(prompt[0], (str, list))
    single = prompt[0] if batch else prompt
    field = "text" if isinstance(single, str) else "input_ids"
    return {field: prompt, "sampling_params": sampling_params(knob, **sampling)}
