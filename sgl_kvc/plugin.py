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
    from sgl_kvc.compat import IncompatibleError, check_seams, release

    try:
        compat = release()
        check_seams(compat.hooks())
        compat.register()
    except IncompatibleError as error:
        sys.exit(f"sgl-kvc: {error}")
    except Exception as error:
        logger.exception("sgl-kvc could not register")
        sys.exit(f"sgl-kvc: could not register with SGLang: {error!r}")
