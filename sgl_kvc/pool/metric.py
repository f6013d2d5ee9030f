"""Whether there is memory for the metric of compression in decode when a GPU's server starts."""

from __future__ import annotations

import os

#: `--kvc-recompress` travels to SGLang's processes in this variable.
VARIABLE = "SGL_KVC_RECOMPRESS"
CHOICES = ("on", "off")
#: Of one KV of one head, a float32.
BYTES = 4


def made_at_start() -> bool:
    """Whether it is made with the pool; else by the first request that needs it."""
    return os.environ.get(VARIABLE, "on") != "off"
