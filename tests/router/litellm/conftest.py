"""LiteLLM leaves connections open, which the garbage collector would report in a later test, so it is called here at once."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()
