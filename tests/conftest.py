"""Before all tests: where there is no GPU, Triton is imported for its interpreter."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    # Triton's own functions become what the variable says when they are imported; kernels, when
    # tests/kernels/gpu imports them. Then it goes, so that servers of other tests do not see it.
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.experimental.gluon
    import triton.language  # noqa: F401

    del os.environ["TRITON_INTERPRET"]
