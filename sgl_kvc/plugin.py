"""What SGLang loads: entry point ``sglang.srt.plugins``."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger(__name__)


def register() -> None:
    """Register with the SGLang that is loading us, or stop the process with one sentence.

    SGLang logs and swallows a plugin's exceptions and would then serve without it. What it
    does not swallow is SystemExit.
    """
    import torch

    from sgl_kvc.compat.check import check_hooks, check_symbols
    from sgl_kvc.compat.hook import IncompatibleError
    from sgl_kvc.compat.releases import release

    try:
        line, gpu = release(), torch.cuda.is_available()
        hooks = line.all_hooks(gpu=gpu)
        check_hooks(hooks)
        check_symbols(line.all_symbols(gpu=gpu))
        line.register()
        _take(hooks)
    except IncompatibleError as error:
        sys.exit(f"sgl-kvc: {error}")
    except Exception as error:
        logger.exception("sgl-kvc could not register")
        sys.exit(f"sgl-kvc: could not register with SGLang: {error!r}")


def _take(hooks) -> None:
    """Register the hooks with SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])
