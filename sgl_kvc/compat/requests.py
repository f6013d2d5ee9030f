"""Values that SGLang 0.5.17 accepts and that would then end its scheduler: refused with a sentence.

Each is found in the HTTP process, so that the request fails by itself and with status 400.
"""

from __future__ import annotations

import functools
import re

import msgspec

from sgl_kvc.compat.hook import Hook

_INT32_MAX = 2**31 - 1
_FLOAT32_MAX = 3.4028234e38
#: Answers to one prompt; every one costs memory before it waits for its turn.
MOST_CHOICES = 1024
#: Divided by the least temperature that SGLang computes with, 1e-6, still a number.
_LARGEST_LOGIT = 1e30
#: Of a tokenized request: made by SGLang itself, or large and of one type already.
_MADE = {
    "input_ids", "input_embeds", "mm_inputs", "mm_data_mooncake", "num_items_assigned",
    "positional_embed_overrides", "sampling_params", "session_params", "time_stats",
}  # fmt: skip


def check_sampling(params, vocab_size: int) -> None:
    """``SamplingParams.verify``: raise ValueError for what the scheduler cannot read or hold."""
    check_types(params)
    for name in ("top_k", "min_new_tokens"):
        value = getattr(params, name)
        if value > _INT32_MAX:
            raise ValueError(f"{name} must be at most {_INT32_MAX}, got {value}.")
    if params.stream_interval is not None and params.stream_interval < 1:
        raise ValueError(f"stream_interval must be at least 1, got {params.stream_interval}.")
    for token, bias in (params.logit_bias or {}).items():
        if not abs(bias) <= _FLOAT32_MAX:
            raise ValueError(f"logit_bias must be 32-bit numbers, got {bias} for token {token}.")
    if params.min_new_tokens > 0:
        for token in params.stop_token_ids or ():
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"stop_token_ids must be in [0, {vocab_size - 1}] where min_new_tokens is "
                    f"set, got {token}."
                )


def check_types(params) -> None:
    """Raise ValueError for the first field that is not of its declared type.

    An integer that was written 4.0 becomes one: SGLang cuts lists at `max_new_tokens`.
    `custom_params` may be anything: nothing is computed with it.
    """
    for field in _fields(params.__class__):
        value = getattr(params, field.name)
        converted = _checked(field, value)
        if converted is not value:
            setattr(params, field.name, converted)


_fields = functools.cache(msgspec.structs.fields)


def _checked(field, value):
    """`value`, an integer if it was written 4.0. Raises ValueError, which names the field."""
    if field.name == "custom_params":
        return value
    whole = isinstance(value, float) and value.is_integer() and abs(value) <= _INT32_MAX
    try:
        converted = msgspec.convert(int(value) if whole else value, field.type)
    except msgspec.ValidationError as error:
        raise ValueError(f"{field.name}: {error}.") from error
    return converted if whole else value


def _check_named(given: dict, struct: type, where: str) -> None:
    """Raise ValueError for what is no field of `struct`, or not of its type; convert the rest."""
    fields = {field.name: field for field in _fields(struct)}
    for name, value in given.items():
        if name not in fields:
            raise ValueError(f"{where}: there is no {name!r}.")
        if value is not None or name == "n":
            given[name] = _checked(fields[name], value)


def check_parameters(request) -> None:
    """``GenerateReqInput.normalize_batch_and_arguments``: raise ValueError for what `request`
    says in free dictionaries, and is computed with before it is converted.
    """
    from sglang.srt.managers.io_struct import SessionParams
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = request.sampling_params
    if params == [] or not isinstance(params, dict | list | None):
        raise ValueError("sampling_params must be an object, or one for every prompt.")
    for given in params if isinstance(params, list) else [params or {}]:
        _check_named(given, SamplingParams, "sampling_params")
        if not 1 <= given.get("n", 1) <= MOST_CHOICES:
            raise ValueError(f"n must be in [1, {MOST_CHOICES}], got {given['n']}.")
    _check_named(request.session_params or {}, SessionParams, "session_params")


def check_stop_regex(original, params, tokenizer) -> None:
    """``SamplingParams.normalize``: a regex that cannot be read is the client's error."""
    try:
        original(params, tokenizer)
    except re.error as error:
        raise ValueError(f"stop_regex is not a regular expression: {error}.") from error


def check_request(manager, obj, input_ids) -> None:
    """``TokenizerManager._validate_one_request``: raise ValueError for what has no logits."""
    vocabulary = manager.model_config.vocab_size
    asked = getattr(obj, "top_logprobs_num", None) or 0
    if not isinstance(asked, int) or not 0 <= asked <= vocabulary:
        raise ValueError(f"top_logprobs_num must be in [0, {vocabulary}], got {asked}.")
    if input_ids:
        for token in (min(input_ids), max(input_ids)):
            if not 0 <= token < vocabulary:
                raise ValueError(f"input_ids must be in [0, {vocabulary - 1}], got {token}.")


def check_tokenized(tokenized, *_args, **_kwargs) -> None:
    """``TokenizerManager._create_tokenized_object``: raise ValueError for a list meant for many
    requests that one request came with, and for counts below any that has a meaning.
    """
    for field in _fields(tokenized.__class__):
        if field.name not in _MADE:
            _checked(field, getattr(tokenized, field.name))
    if getattr(tokenized, "logprob_start_len", -1) < -1:
        begin = tokenized.logprob_start_len
        raise ValueError(f"logprob_start_len must be at least -1, got {begin}.")
    overrides = tokenized.positional_embed_overrides
    if overrides is not None and not hasattr(overrides, "positions"):
        raise ValueError("positional_embed_overrides cannot be told by JSON.")


def mend_logits(_result, sampling, logits) -> None:
    """``SamplingBatchInfo.apply_logits_bias``: nothing that cannot be sampled from is left.

    In `logits` [B, vocabulary]. A grammar that the vocabulary cannot write forbids every token,
    penalties and biases can leave the numbers of a float. Sampling then raises, and on a GPU the
    device with it, for the whole batch. Where every token is forbidden any is allowed: the grammar
    refuses it, which ends that request. What a batch without them computes is not looked at.
    """
    penalties = sampling.penalizer_orchestrator
    if (
        sampling.grammar_mask is None
        and sampling.logit_bias is None
        and sampling.acc_additive_penalties is None
        and sampling.acc_scaling_penalties is None
        and not (penalties and penalties.is_required)
    ):
        return
    forbidden = float("-inf")
    logits.nan_to_num_(nan=forbidden, posinf=_LARGEST_LOGIT, neginf=forbidden)
    logits.clamp_(max=_LARGEST_LOGIT)
    nothing_left = logits.amax(dim=-1, keepdim=True) < -_LARGEST_LOGIT
    logits.masked_fill_(nothing_left, 0.0)


HOOKS = (
    Hook(
        "sglang.srt.sampling.sampling_params.SamplingParams.verify",
        "BEFORE",
        check_sampling,
        "sampling_params is a free dictionary upstream: the scheduler ends where it computes with "
        "a wrong type, or makes a tensor of a number that is too large",
    ),
    Hook(
        "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
        "BEFORE",
        check_parameters,
        "upstream answers 500, and makes as many copies of a request as `n` says",
    ),
    Hook(
        "sglang.srt.sampling.sampling_params.SamplingParams.normalize",
        "AROUND",
        check_stop_regex,
        "upstream answers 500",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        "BEFORE",
        check_request,
        "upstream asks for more logits than there are, and looks up embeddings that are not there",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object",
        "AFTER",
        check_tokenized,
        "upstream takes lists, and counts below zero, where one request has one value",
    ),
    Hook(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.apply_logits_bias",
        "AFTER",
        mend_logits,
        "torch.multinomial raises for NaN, infinities and rows without any token",
    ),
)
