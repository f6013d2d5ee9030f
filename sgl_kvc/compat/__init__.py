"""Where we meet SGLang: hooks by topic, the releases, and every symbol that is relied on.

* `hook.py`: what a hook is, and the error when this SGLang cannot be served with.
* `arguments.py`, `scheduling.py`, `pool.py`, `graphs.py`, `http.py`, `chat.py`, `segments.py`: the
  hooks, each with its reason.
* `symbols.py`: what we import, subclass, override, call or read of SGLang's, checked at startup.
* `releases.py`: the SGLang releases that are supported, and what differs between them.
"""

from __future__ import annotations

#: What ``--attention-backend`` is called.
BACKEND = "kvc"


def serving_with_kvc() -> bool:
    """True in a process that serves with our attention backend."""
    from sglang.srt.runtime_context import get_exec

    return get_exec().kernel.attention_backend == BACKEND
