"""The store's functions and Python use the same names and numbers for the same things."""

from dataclasses import fields

from kvatlas.blocks.digest import WORDS
from kvatlas.blocks.tiers import TIER_MASK
from kvatlas.bus import wire
from kvatlas.index.apply_counts import ApplyCounts
from kvatlas.index.holder_entries import MAX_HOLDER, NUMBER_BYTES
from kvatlas.index.mark_lookup import HEAD_ENTRY_BYTES, SEGMENT
from kvatlas.index.protocol import ApplyResult
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.index.redis.records import StoredRecord
from tests.kvatlas.lua_text import constants, numbers, words

SLOT = constants(INDEX_LIBRARY.source("_slot"))


def test_outcomes_of_messages_have_the_same_names_in_the_same_order() -> None:
    names = [field.name for field in fields(ApplyCounts)]
    assert words(INDEX_LIBRARY.source("_apply"), "COUNTS") == names
    outcomes = [field.name for field in fields(ApplyResult) if field.type == "int" or field.type is int]
    assert outcomes == names[: len(outcomes)]


def test_a_workers_record_has_its_fields_in_the_same_order() -> None:
    assert [SLOT[name.upper()] for name in StoredRecord._fields] == list(range(1, len(StoredRecord._fields) + 1))


def test_events_have_the_same_codes() -> None:
    codes = {
        "stored": wire.STORED,
        "removed": wire.REMOVED,
        "cleared": wire.CLEARED,
        "begin": wire.BEGIN,
        "chunk": wire.CHUNK,
        "ending": wire.END,
        "checkpoint": wire.CHECKPOINT,
        "marked": wire.MARKED,
        "unmarked": wire.UNMARKED,
        "heads": wire.HEADS,
    }
    assert numbers(INDEX_LIBRARY.source("_fence"), "CODE") == codes


def test_events_have_the_same_fields() -> None:
    fence = constants(INDEX_LIBRARY.source("_fence"))
    names = {"CODE": wire.CODE, "SCOPE": wire.SCOPE_ID, "TIER": wire.TIER, "HASHES": wire.HASHES}
    names["PARENT"] = wire.PARENT
    assert {name: fence[f"EVENT_{name}"] - 1 for name in names} == names
    assert (fence["REMOVED_LOW"], fence["REMOVED_HIGH"]) == (wire.HASHES + 2, wire.HASHES + 3)  # after the last field
    assert (fence["STORED_LOW"], fence["STORED_HIGH"]) == (wire.RESERVED + 2, wire.RESERVED + 3)
    assert (fence["END_CHUNKS"], fence["END_DIGEST"]) == (wire.CHUNKS + 1, wire.END_DIGEST + 1)
    assert fence["CHECKPOINT_DIGEST"] == wire.CHECKPOINT_DIGEST + 1
    assert fence["BEGIN_DROPPED"] == wire.DROPPED + 1
    assert (fence["MARK_HASHES"], fence["HEAD_BITS"]) == (wire.MARK_HASHES + 1, wire.HEAD_BITS + 1)


def test_masks_and_sizes_are_the_same() -> None:
    assert SLOT["TIER_MASK"] == TIER_MASK
    marks = constants(INDEX_LIBRARY.source("_marks"))
    assert (marks["SEGMENT"], marks["MARK"], marks["HEAD"]) == (SEGMENT, NUMBER_BYTES, HEAD_ENTRY_BYTES)
    assert SLOT["MAX_HOLDER"] == MAX_HOLDER
    assert SLOT["DIGEST_WORDS"] == WORDS
