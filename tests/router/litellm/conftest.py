"""LiteLLM leaves connections open, which the collector reports in whichever test comes next: here it is called at once."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def _collected() -> Iterator[None]:
    yield
    gc.collect()
