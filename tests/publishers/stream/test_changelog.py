"""Ledger in, outbox out: the rules of incarnations, without a server."""

import random

import pytest

from kvatlas.blocks.tiers import Tier
from kvatlas.bus.wire import decode, decode_raw
from kvatlas.errors import InvalidValue
from kvatlas.events import EngineBatch, EngineRemoved, EngineStored, Removed, SnapshotBegin
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import PartitionBatch
from publishers.counters import PublisherCounters
from publishers.ledger.ledger import Ledger, LedgerSettings
from publishers.stream.changelog import Telling, Want
from publishers.stream.outbox import OutboxLimits

NOW_US = 1_763_700_000_000_000


def telling(limits: OutboxLimits | None = None, saved: int = 0) -> Telling:
    ledger = Ledger(LedgerSettings("model", "model", block_size=4))
    return Telling("w", ledger, PublisherCounters(), limits=limits, saved_incarnation=saved, rng=random.Random(1))


def stored(name: int) -> EngineBatch:
    return EngineBatch([EngineStored([name], None, [name] * 4, 4)])


def begin(told: Telling) -> None:
    assert told.begin(told.reserve(NOW_US), NOW_US)


def flush(told: Telling) -> int:
    return told.tell(told.fold(), NOW_US, 0.0)


def drain(told: Telling) -> list[bytes]:
    payloads = []
    while (outgoing := told.outbox.take()) is not None:
        payloads.append(outgoing.payload)
        told.outbox.acked(outgoing.round, outgoing.seq, outgoing.seq + 1)
    return payloads


def test_nothing_is_told_before_the_first_incarnation() -> None:
    told = telling()
    told.take(stored(1))
    assert flush(told) == 0
    assert told.wanted is None
    told.want(Want.START)
    begin(told)
    (snapshot,) = drain(told)
    assert isinstance(decode(snapshot).events[0], SnapshotBegin)
    assert told.ledger.digest.blocks == 1


def test_pending_events_are_in_the_snapshot_and_not_told_again() -> None:
    told = telling()
    told.want(Want.START)
    told.take(stored(1))
    begin(told)
    assert len(drain(told)) == 1
    assert flush(told) == 0
    assert told.settled


def test_the_last_batches_before_a_new_incarnation_are_told_by_its_snapshot() -> None:
    told = telling()
    told.want(Want.START)
    begin(told)
    told.want(Want.ASKED)
    told.take(stored(1))
    assert flush(told) == 0
    assert told.outbox.next_seq == 1
    begin(told)
    assert told.ledger.digest.blocks == 1


def test_a_store_and_a_removal_that_are_folded_together_are_not_told() -> None:
    told = telling()
    told.want(Want.START)
    begin(told)
    told.take(stored(1))
    told.take(EngineBatch([EngineRemoved([1], Tier.HBM)]))
    assert told.fold() == []


def test_an_overflow_wants_a_new_incarnation() -> None:
    told = telling(OutboxLimits(outbox_messages=2))
    told.want(Want.START)
    begin(told)
    for name in range(4):
        told.take(stored(name))
        flush(told)
    assert told.wanted is Want.OVERFLOW
    begin(told)
    assert told.wanted is None
    assert told.ledger.digest.blocks == 4


def test_starting_over_tells_an_empty_cache() -> None:
    told = telling()
    told.want(Want.START)
    begin(told)
    told.take(stored(1))
    flush(told)
    told.take(stored(2))
    told.start_over()
    assert told.wanted is Want.STARTED_OVER
    told.take(stored(3))
    begin(told)
    assert told.ledger.digest.blocks == 1


def test_starting_over_before_the_first_incarnation_begins_none() -> None:
    told = telling()
    told.start_over()
    assert told.wanted is None


def test_incarnations_are_above_the_saved_and_the_requested_one() -> None:
    told = telling(saved=1 << 62)
    told.want(Want.START)
    number = told.reserve(NOW_US)
    assert number > 1 << 62
    assert told.request(number + 5)
    assert not told.begin(number, NOW_US), "asked to be above it meanwhile"
    begin(told)
    assert told.outbox.incarnation > number + 5
    assert not told.request(number + 5), "it is above it already"
    assert told.wanted is None


def test_a_request_that_leaves_no_number_is_refused() -> None:
    told = telling()
    with pytest.raises(InvalidValue, match="no number"):
        told.request((1 << 64) - 1)
    told.want(Want.START)
    begin(told)


def test_a_request_before_the_start_only_raises_the_number() -> None:
    told = telling()
    assert told.request(1 << 62)
    assert told.wanted is None
    assert told.reserve(NOW_US) > 1 << 62


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(40))
async def test_the_index_ends_with_what_the_ledger_announces(seed: int) -> None:
    """Random engine events, folds, requests, overflows and fresh starts, read through the index's fence."""
    rng = random.Random(seed)
    told = telling(OutboxLimits(outbox_messages=6, message_bytes=2500))
    told.want(Want.START)
    index = MemoryIndex(1)
    held: list[int] = []

    async def apply() -> None:
        for payload in drain(told):
            applied = await index.apply(0, [PartitionBatch(0, [decode_raw(payload)])])
            assert (applied.applied, applied.failed_checks) == (1, 0)

    for step in range(150):
        match rng.randrange(12):
            case 0 | 1 | 2 | 3:
                told.take(stored(step))
                held.append(step)
            case 4 | 5 if held:
                told.take(EngineBatch([EngineRemoved([held.pop(rng.randrange(len(held)))])]))
            case 6 | 7 | 8:
                flush(told)
            case 9:
                await apply()
            case 10 if told.wanted is not None or rng.random() < 0.2:
                told.want(Want.ASKED)
                begin(told)
            case 11 if rng.random() < 0.1:
                told.start_over()
                held.clear()
            case 11:
                flush(told)
                told.checkpoint(NOW_US)
    flush(told)
    if told.wanted is not None:
        begin(told)
    told.checkpoint(NOW_US)
    if told.wanted is not None:
        begin(told)
    await apply()
    assert told.settled
    assert await index.digest("w") == told.ledger.digest.words
    assert told.ledger.digest.blocks == len(held)


def test_counters_tell_blocks_by_change() -> None:
    counters = PublisherCounters()
    told = Telling("w", Ledger(LedgerSettings("model", "model", block_size=4)), counters)
    told.want(Want.START)
    begin(told)
    told.take(stored(1))
    flush(told)
    told.take(EngineBatch([EngineRemoved([1], Tier.HBM)]))
    events = told.fold()
    assert [type(event) for event in events] == [Removed]
    told.tell(events, NOW_US, 0.0)
    assert (counters.blocks_stored, counters.blocks_removed, counters.events) == (1, 1, 2)
