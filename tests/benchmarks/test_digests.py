"""The benchmark of the cost of digests depends on the text of the function library."""

from benchmarks.index.digests import build_library_without_digests
from kvatlas.index.redis.index_functions import INDEX_LIBRARY


def test_the_variant_without_digests_can_be_made() -> None:
    assert build_library_without_digests() != INDEX_LIBRARY.code
