"""If an element of the four interfaces differs on purpose, a page says so."""

import re
from pathlib import Path

import pytest

from tests.end_to_end.processes import ROOT

CONCEPTS, CACHE = Path("docs/concepts.md"), Path("docs/cache-manager.md")
DIFFERENCES = [
    ("a residency's key", CONCEPTS, "scope and sequence hash replace the key"),
    ("a residency's bytes", CONCEPTS, "one size for each worker, scope and tier"),
    ("a residency's last access and reference count", CONCEPTS, "Last access and references are not kept"),
    ("an empty tenant, or another empty name", CONCEPTS, "empty names are refused"),
    ("LMCache as a kind of engine", CONCEPTS, "`--engine` can't be LMCache"),
    ("blocks of groups above 0", CONCEPTS, "Groups above 0 are not published"),
    ("events without tokens among others", CONCEPTS, "an event without them describes additional copies"),
    ("the count of puts", CONCEPTS, "a put only if the residency is new"),
    ("locate", CONCEPTS, "shows only blocks whose whole prefix is held"),
    ("the removal of a block", CONCEPTS, "the index keys by (scope, sequence hash)"),
    ("capacities' defaults", CONCEPTS, "the profile `quillcache` assumes 80 GiB"),
    ("worker ids of the router protocol", CONCEPTS, "worker ids are text; a numeric id is returned as a number"),
    ("key, value and KV tensors", CACHE, "there are no tensors here"),
    ("compression and its statistics", CACHE, "compress a sequence"),
    ("a block table that callers change", CACHE, "`block_table(id)` is a copy"),
    ("a request's estimated bytes", CACHE, "counts `max_tokens`, or otherwise the whole prompt"),
    ("eviction of live sequences", CACHE, "evict live sequences when memory runs out"),
    ("eviction candidates by sequence", CACHE, "policies order blocks that no sequence holds"),
    ("unknown and existing sequences", CACHE, "write to or read an unknown sequence, share onto an existing one"),
    ("fragmentation", CACHE, "fragmentation: the share of partial blocks"),
    ("utilization", CACHE, "utilization: the share of blocks that are not free"),
]


@pytest.mark.parametrize(("element", "page", "text"), DIFFERENCES, ids=[element for element, *_ in DIFFERENCES])
def test_a_page_says_where_an_element_differs(element: str, page: Path, text: str) -> None:
    said = re.sub(r"\s+", " ", (ROOT / page).read_text())
    assert text in said, f"{page} does not say how {element} differs"
