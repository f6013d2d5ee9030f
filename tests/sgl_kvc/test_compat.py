"""Every symbol of SGLang's that is hooked is there, also those that only a GPU needs."""

from __future__ import annotations

from sgl_kvc.compat import check_seams, release


def test_seams():
    compat = release()
    assert compat.GPU_HOOKS
    check_seams([*compat.HOOKS, *compat.GPU_HOOKS])
