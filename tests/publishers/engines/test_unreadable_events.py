"""The handling of events and payloads that can't be decoded."""

from typing import Any

import msgpack
import pytest

from kvatlas.errors import EngineEventError
from kvatlas.fleet.records import EngineKind
from kvatlas_publishers.engine_events import EngineDropped, EngineRemoved, EngineStored
from kvatlas_publishers.engines import MAX_PAYLOAD_BYTES, decode_batch
from tests.publishers.engines.event_batches import BOTH, batch, stored


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "event",
    [
        ["BlockMoved", [1]],
        {"type": "BlockMoved"},
        {"no": "type"},
        [],
        7,
        [["BlockStored"], []],
        stored(block_hashes="ab"),
        stored(block_hashes=[1.5]),
        stored(block_hashes=[True, False]),
        stored(parent_block_hash="x"),
        stored(token_ids="abc"),
        stored(token_ids=[1, None]),
        stored(token_ids=[[1, 2], 3]),
        stored(block_size=-1),
        stored(block_size="16"),
        stored(lora_name=7),
        stored(medium=7),
        ["BlockRemoved"],
    ],
)
def test_only_the_undecodable_event_is_skipped(kind: EngineKind, event: Any) -> None:
    decoded = batch(event, stored(), kind=kind)
    assert [type(one) for one in decoded.events][-1] is EngineStored and len(decoded.skipped) == 1
    assert "\n" not in decoded.skipped[0]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("event", [["BlockRemoved"], {"type": "BlockRemoved", "block_hashes": [1.5]}])
def test_a_removal_that_names_no_blocks_makes_all_before_it_unknown(kind: EngineKind, event: Any) -> None:
    decoded = batch(stored(), event, stored(block_hashes=[7, 8]), kind=kind)
    assert decoded.lost and [one.hashes for one in decoded.events] == [[7, 8]]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "event",
    [
        ["BlockMoved", [1, 3]],
        {"type": "BlockMoved", "block_hashes": [1, 3]},
        {"type": "BlockRemoved", "block_hashes": [1, 3], "medium": 7},
    ],
)
def test_the_blocks_that_an_unreadable_event_names_are_dropped_from_all_tiers(kind: EngineKind, event: Any) -> None:
    decoded = batch(stored(), event, stored(block_hashes=[7, 8]), kind=kind)
    assert not decoded.has_lost(distrust_unknown=True)
    assert decoded.events[1] == EngineDropped([1, 3], None)
    assert [one.hashes for one in decoded.events] == [[1, 2], [1, 3], [7, 8]]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("event", [{"no": "type"}, 7, ["BlocksMoved", "GPU"]])
def test_an_unknown_event_that_names_no_blocks_may_have_removed_any(kind: EngineKind, event: Any) -> None:
    """Earlier events of its batch, including a removal, count all the same."""
    decoded = batch(stored(), event, stored(block_hashes=[7, 8]), kind=kind)
    assert not decoded.lost and decoded.unknown_at == 1
    assert [one.hashes for one in decoded.events] == [[1, 2], [7, 8]]
    assert decoded.has_lost(distrust_unknown=True) and not decoded.has_lost(distrust_unknown=False)
    assert [one.hashes for one in decoded.known_events] == [[7, 8]]


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockRemoved", "block_hashes": [1], "medium": "TAPE"},  # its blocks are never published
        stored(block_hashes="ab"),
        stored(medium=7),
    ],
)
def test_an_event_that_removed_no_block_is_skipped_alone(kind: EngineKind, event: Any) -> None:
    decoded = batch(stored(), event, stored(block_hashes=[7, 8]), kind=kind)
    assert not decoded.has_lost(distrust_unknown=True)
    assert [one.hashes for one in decoded.events] == [[1, 2], [7, 8]]


@pytest.mark.parametrize(
    "event", [stored(extra_keys="x"), stored(extra_keys=[3, 4]), stored(extra_keys=[[3.5]]), stored(group_idx=-1)]
)
def test_vllm_fields_that_cant_be_decoded_skip_the_event(event: Any) -> None:
    assert len(batch(event).skipped) == 1


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"garbage\xc1",
        msgpack.packb([1.0, [["AllBlocksCleared"]], 0])[:-4],
        msgpack.packb(5),
        msgpack.packb([1.0]),
        msgpack.packb(["now", []]),
        msgpack.packb([1.0, {"a": 1}]),
        msgpack.packb([1.0, [], "rank"]),
        msgpack.packb({"other": 1}),
        b"\x91" * 5000,
        b"\x81\x90\x01",
        bytes(MAX_PAYLOAD_BYTES + 1),
    ],
    ids=lambda payload: f"{len(payload)}-{payload[:8].hex()}",
)
def test_an_undecodable_payload_is_one_clear_line(kind: EngineKind, payload: bytes) -> None:
    with pytest.raises(EngineEventError) as refused:
        decode_batch(kind, payload)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 200


def test_a_payload_above_the_limit_is_refused_with_its_size() -> None:
    with pytest.raises(EngineEventError, match="payload of 67108865 bytes; expected at most 67108864"):
        decode_batch(EngineKind.VLLM, bytes(MAX_PAYLOAD_BYTES + 1))


def test_a_leaf_of_a_million_tokens_is_removed_in_one_event() -> None:
    """As SGLang does with pages of one token; hashes take nine bytes each."""
    names = [-(1 << 62) - at for at in range(1_000_000)]
    decoded = batch({"type": "BlockRemoved", "block_hashes": names, "medium": "GPU"}, kind=EngineKind.SGLANG)
    assert decoded.events == [EngineRemoved(names)]


def test_an_engine_kind_without_a_zmq_feed_is_refused() -> None:
    with pytest.raises(EngineEventError, match="lmcache"):
        decode_batch(EngineKind.LMCACHE, b"")
