"""The open event forms as docs/events.md describes them, with its examples and its schema."""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.hashing import local_hash
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import EngineEventError
from kvatlas.fleet.records import EngineKind, ForwardPassMetrics
from kvatlas.fleet.reported_load import read_load
from kvatlas.request import RequestHints
from kvatlas_publishers.engine_events import EngineBatch, EngineCleared, EngineDropped, EngineRemoved, EngineStored
from kvatlas_publishers.engines import decode_batch
from kvatlas_publishers.engines.open_models import json_schema

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "events.md").read_text()
EXAMPLES = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)]
BATCHES = [one for one in EXAMPLES if "events" in one]
INTEGERS = st.integers(-(1 << 63), (1 << 64) - 1)


def decode(batch: Any) -> EngineBatch:
    """Decode the batch from JSON and from msgpack, which must agree as far as msgpack has the integers."""
    decoded = decode_batch(EngineKind.OPEN, json.dumps(batch).encode())
    with suppress(OverflowError):
        assert decode_batch(EngineKind.OPEN, msgpack.packb(batch)) == decoded
    return decoded


def test_the_schema_in_the_documentation_is_that_of_the_models() -> None:
    """To write it: python -c 'import json; from publishers.engines.open_models import json_schema as s;
    print(json.dumps(s(), indent=2))' > docs/events.schema.json"""
    assert json.loads((DOCS / "events.schema.json").read_text()) == json_schema()


@pytest.mark.parametrize("example", BATCHES)
def test_each_example_fits_the_schema_and_is_read_whole(example: dict[str, Any]) -> None:
    jsonschema.validate(example, json_schema())
    batch = decode(example)
    assert (len(batch.events), batch.skipped) == (len(example["events"]), [])


def test_the_examples_are_of_every_kind() -> None:
    kinds = [type(event) for example in BATCHES for event in decode(example).events]
    assert {EngineStored, EngineRemoved, EngineDropped, EngineCleared} == set(kinds)
    assert [decode(one).header for one in BATCHES if "load" in one] and len(BATCHES) == 3
    (hints,) = [one for one in EXAMPLES if "events" not in one]
    assert RequestHints.parse(hints).ignored_fields == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("events", 0, "block_hashes"), "a"),
        (("events", 0, "block_hashes", 0), 1 << 64),
        (("events", 0, "block_hashes", 0), 1.0e19),
        (("events", 0, "block_hashes", 0), True),
        (("events", 0, "block_hashes", 0), ""),
        (("events", 0, "block_size"), 0),
        (("events", 0, "token_ids"), [1, 2, 3]),
        (("events", 0, "token_ids"), [-1, 2, 3, 4]),
        (("events", 0, "group_idx"), -1),
        (("events", 0, "medium"), 5),
        (("events", 0, "medium"), "moon"),
        (("events", 0, "lora_name"), ""),
    ],
)
def test_a_stored_event_that_cant_be_read_is_skipped_and_takes_nothing_away(path: Any, value: Any) -> None:
    stored = {"type": "block_stored", "block_hashes": ["a"], "token_ids": [1, 2, 3, 4], "block_size": 4}
    batch: Any = {"engine_id": "e", "events": [stored, {"type": "block_removed", "block_hashes": ["b"]}]}
    at = batch
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    decoded = decode(batch)
    assert (decoded.events, decoded.lost) == ([EngineDropped([b"b"])], False)
    (line,) = decoded.skipped
    assert "\n" not in line and ("expected" in line or "hash" in line)


@pytest.mark.parametrize("event", [{"type": "block_removed"}, {"type": "block_removed", "block_hashes": [1.5]}])
def test_a_removal_that_names_no_blocks_loses_what_came_before_it(event: Any) -> None:
    cleared = {"type": "all_blocks_cleared"}
    decoded = decode({"engine_id": "e", "events": [cleared, event, cleared]})
    assert (decoded.events, decoded.lost, len(decoded.skipped)) == ([EngineCleared(tuple(Tier))], True, 1)


@pytest.mark.parametrize("event", [{"type": "block_moved"}, {}, 5, None])
def test_an_event_of_another_type_that_names_no_blocks_may_have_removed_any(event: Any) -> None:
    cleared = {"type": "all_blocks_cleared"}
    decoded = decode({"engine_id": "e", "events": [cleared, event, cleared]})
    assert (decoded.lost, decoded.unknown_at, len(decoded.events)) == (False, 1, 2)
    assert decoded.has_lost(distrust_unknown=True)


def test_the_blocks_that_an_unreadable_event_names_are_dropped() -> None:
    moved = {"type": "block_moved", "block_hashes": ["a", 7]}
    removed = {"type": "block_removed", "block_hashes": ["b"], "medium": 5}
    decoded = decode({"engine_id": "e", "events": [moved, removed]})
    assert decoded.events == [EngineDropped([b"a", 7], None), EngineDropped([b"b"], None)]
    assert not decoded.has_lost(distrust_unknown=True)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            {"type": "block_moved"},
            "event: type is 'block_moved'; expected one of block_stored, block_removed, all_blocks_cleared",
        ),
        ({}, "event: type is missing"),
        ({"type": "block_removed"}, "event block_removed.block_hashes is missing"),
        ({"type": "block_stored", "block_hashes": 5}, "event block_stored.block_hashes is 5; expected a list"),
    ],
)
def test_a_skipped_event_is_described(event: Any, line: str) -> None:
    assert decode({"engine_id": "e", "events": [event]}).skipped == [line]


@given(st.lists(INTEGERS, min_size=1, max_size=8), INTEGERS)
def test_integers_of_64_bits_round_trip_signed_and_unsigned(names: list[int], parent: int) -> None:
    blocks = [{"block_hash": name, "tokens_hash": name} for name in names]
    events = [
        {"event_id": (1 << 64) - 1, "data": {"stored": {"parent_hash": parent, "blocks": blocks}}},
        {"event_id": 0, "data": {"removed": {"block_hashes": names}}},
    ]
    stored, dropped = decode({"events": events, "shutdown": True}).events
    unsigned = [name % (1 << 64) for name in names]
    assert isinstance(stored, EngineStored) and stored.local_hashes is not None
    assert (stored.hashes, stored.parent, stored.local_hashes.hashes) == (unsigned, parent % (1 << 64), unsigned)
    assert dropped == EngineDropped(unsigned)
    engines = {"type": "block_stored", "block_hashes": names, "parent_block_hash": parent, "block_size": 1}
    (stored,) = decode({"engine_id": "e", "events": [engines]}).events
    assert isinstance(stored, EngineStored)
    assert (stored.hashes, stored.parent) == (unsigned, parent % (1 << 64))


def test_a_hash_is_the_same_block_as_integer_and_as_its_hex_digits() -> None:
    event = {"type": "block_removed", "block_hashes": [-1, "f" * 16, "F" * 16, "ff"]}
    assert decode({"engine_id": "e", "events": [event]}).events == [
        EngineDropped([(1 << 64) - 1, (1 << 64) - 1, b"F" * 16, b"ff"])
    ]


def test_events_of_several_ranks_are_no_batch() -> None:
    events = [{"event_id": at, "data": "cleared", "dp_rank": at} for at in range(2)]
    assert decode({"events": events[1:], "shutdown": False}).dp_rank == 1
    with pytest.raises(EngineEventError, match="dp_rank 0, 1; expected one rank"):
        decode({"events": events, "shutdown": False})


def test_the_documented_local_hashes_are_those_of_tokens() -> None:
    router = next(one for one in BATCHES if "shutdown" in one)
    told = [block["tokens_hash"] for block in router["events"][0]["data"]["stored"]["blocks"]]
    assert told == [local_hash([1, 2, 3, 4]), local_hash([5, 6, 7, 8])]


def test_the_documented_names_of_a_load_are_known() -> None:
    table = PAGE.partition("## Load")[2].partition("\n## ")[0]
    names = set(re.findall(r"`(\w+)`", "".join(line for line in table.splitlines() if line.startswith("|"))))
    for name in names:
        read_load({name: 1}, "w", 1)
    (load,) = [one["load"] for one in BATCHES if "load" in one]
    metrics = read_load(load, "w", 1).forward_pass
    assert metrics == ForwardPassMetrics(
        active_request_slots=3, total_request_slots=64, active_kv_blocks=100, total_kv_blocks=4096, cache_usage=0.02,
        prefix_hit_rate=0.4,
    )  # fmt: skip


def test_integers_beyond_64_bits_and_deep_nesting_are_refused_in_one_line() -> None:
    event = {"event_id": 1, "data": {"stored": {"blocks": [{"block_hash": 1 << 200, "tokens_hash": 1}]}}, "x": 1 << 90}
    decoded = decode({"events": [event], "shutdown": False})
    assert decoded.header is not None
    assert (len(decoded.skipped), [event_id for event_id, _ in decoded.header.event_ids]) == (1, [1])
    nested = b'{"events": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(EngineEventError):
        decode_batch(EngineKind.OPEN, nested)
    with pytest.raises(EngineEventError, match="more than 262144 arrays and objects"):
        decode_batch(EngineKind.OPEN, b'{"events": [' + b"{}," * 300_000 + b"5]}")
