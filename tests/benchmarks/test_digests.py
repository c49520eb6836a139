"""The benchmark of what digests cost needs the function library as it knows it."""

from benchmarks.index.digests import build_library_without_digests
from kvatlas.index.redis.index_functions import INDEX_LIBRARY


def test_the_variant_without_digests_can_be_made() -> None:
    assert build_library_without_digests() != INDEX_LIBRARY.code
