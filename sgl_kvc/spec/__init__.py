"""The compression knob: what a request can ask for, and what that means for its prompt.

This package imports neither torch nor SGLang, so the gateway can refuse a bad knob by the same
rules as the engine. The gateway imports nothing else of ours.
"""

from sgl_kvc.spec.catalogue import Method, Parameter, methods
from sgl_kvc.spec.compression import (
    CHOICES,
    FIELDS,
    INTEGERS,
    LAST_MESSAGE,
    MAX_RATE,
    ON_PRESSURE,
    SWITCHES,
    CompressionSpec,
)
from sgl_kvc.spec.digests import chained_digests
from sgl_kvc.spec.errors import CUSTOM_PARAM, PIN_PARAM, TIME_PARAM, SpecError
from sgl_kvc.spec.extent import Extent
from sgl_kvc.spec.parse import OFF, parse, parse_rate, policy_parameters
from sgl_kvc.spec.presets import (
    DEFAULT_POLICY,
    DEFAULT_QUESTION_APART,
    MIN_RECENT,
    PRESETS,
    Preset,
    default_policy,
)
from sgl_kvc.spec.wire import KNOB_HEADER, NAMESPACE_HEADER, WORKER_KEYS, routed

__all__ = [
    "CHOICES",
    "CUSTOM_PARAM",
    "DEFAULT_POLICY",
    "DEFAULT_QUESTION_APART",
    "FIELDS",
    "INTEGERS",
    "KNOB_HEADER",
    "LAST_MESSAGE",
    "MAX_RATE",
    "MIN_RECENT",
    "NAMESPACE_HEADER",
    "OFF",
    "ON_PRESSURE",
    "PIN_PARAM",
    "PRESETS",
    "SWITCHES",
    "TIME_PARAM",
    "WORKER_KEYS",
    "CompressionSpec",
    "Extent",
    "Method",
    "Parameter",
    "Preset",
    "SpecError",
    "chained_digests",
    "default_policy",
    "methods",
    "parse",
    "parse_rate",
    "policy_parameters",
    "routed",
]
