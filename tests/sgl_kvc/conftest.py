from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sgl_kvc.test_cache import Lives


@pytest.fixture
def checked_lives() -> Iterator[Lives]:
    """The machine of `test_cache`, for its checks; they are made at the end too.

    Who asks for it has set SGLang's server arguments.
    """
    lives = Lives()
    lives.build()
    yield lives
    lives.accounting()
    lives.contents()
    lives.teardown()
