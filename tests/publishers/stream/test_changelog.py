"""Ledger in, outbox out: the rules of incarnations, without a server."""

import random

import pytest

from kvatlas.blocks.digest import Digest
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.partition_batch import PartitionBatch
from kvatlas.bus.wire import decode, decode_raw
from kvatlas.errors import InvalidValue
from kvatlas.events import Removed, SnapshotBegin
from kvatlas.index.memory.index import MemoryIndex
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.engine_events import EngineBatch, EngineRemoved, EngineStored
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from kvatlas_publishers.stream.changelog import Changelog, IncarnationReason
from kvatlas_publishers.stream.outbox import OutboxLimits

NOW_US = 1_763_700_000_000_000


def new_changelog(limits: OutboxLimits | None = None, saved: int = 0) -> Changelog:
    ledger = Ledger(LedgerSettings("model", "model", block_size=4))
    return Changelog("w", ledger, PublisherCounters(), limits=limits, saved_incarnation=saved, rng=random.Random(1))


def stored(name: int) -> EngineBatch:
    return EngineBatch([EngineStored([name], None, [name] * 4, 4)])


def begin(changelog: Changelog) -> None:
    assert changelog.begin_incarnation(changelog.next_incarnation(NOW_US), NOW_US)


def flush(changelog: Changelog) -> int:
    return changelog.publish(changelog.fold(), NOW_US, 0.0)


def drain(changelog: Changelog) -> list[bytes]:
    payloads = []
    while (outgoing := changelog.outbox.take()) is not None:
        payloads.append(outgoing.payload)
        changelog.outbox.acknowledge(outgoing.round, outgoing.seq, outgoing.seq + 1)
    return payloads


def test_nothing_is_published_before_the_first_incarnation() -> None:
    changelog = new_changelog()
    changelog.record(stored(1))
    assert flush(changelog) == 0
    assert changelog.incarnation_due is None
    changelog.require_incarnation(IncarnationReason.START)
    begin(changelog)
    (snapshot,) = drain(changelog)
    assert isinstance(decode(snapshot).events[0], SnapshotBegin)
    assert changelog.ledger.digest.blocks == 1


def test_pending_events_are_in_the_snapshot_and_not_published_again() -> None:
    changelog = new_changelog()
    changelog.require_incarnation(IncarnationReason.START)
    changelog.record(stored(1))
    begin(changelog)
    assert len(drain(changelog)) == 1
    assert flush(changelog) == 0
    assert changelog.flushed


def test_the_last_batches_before_a_new_incarnation_are_in_its_snapshot() -> None:
    changelog = new_changelog()
    changelog.require_incarnation(IncarnationReason.START)
    begin(changelog)
    changelog.require_incarnation(IncarnationReason.REQUESTED)
    changelog.record(stored(1))
    flush(changelog)
    begin(changelog)
    assert changelog.ledger.digest.blocks == 1


@pytest.mark.anyio
async def test_until_the_new_incarnation_begins_the_old_one_is_told_of_every_change() -> None:
    """It may wait for a grant; meanwhile, blocks that are gone must not be claimed."""
    changelog = new_changelog()
    changelog.require_incarnation(IncarnationReason.START)
    changelog.record(stored(1))
    changelog.record(stored(2))
    begin(changelog)
    assert changelog.request_snapshot(changelog.outbox.incarnation)
    changelog.record(EngineBatch([EngineRemoved([1], Tier.HBM)]))
    assert flush(changelog) == 1
    index = MemoryIndex(partitions=1)
    payloads = drain(changelog)
    await index.apply(0, [PartitionBatch(0, [decode_raw(payload) for payload in payloads], None, None)])
    assert await index.digest("w") == changelog.ledger.digest.words and changelog.ledger.digest.blocks == 1
    changelog.start_over(NOW_US)
    changelog.record(stored(3))
    flush(changelog)
    await index.apply(0, [PartitionBatch(0, [decode_raw(payload) for payload in drain(changelog)], None, None)])
    assert await index.digest("w") == changelog.ledger.digest.words and changelog.ledger.digest.blocks == 1
    begin(changelog)
    assert len(drain(changelog)) == 1


def test_a_store_and_a_removal_folded_together_are_not_published() -> None:
    changelog = new_changelog()
    changelog.require_incarnation(IncarnationReason.START)
    begin(changelog)
    changelog.record(stored(1))
    changelog.record(EngineBatch([EngineRemoved([1], Tier.HBM)]))
    assert changelog.fold() == []


def test_after_an_overflow_a_new_incarnation_is_due() -> None:
    changelog = new_changelog(OutboxLimits(outbox_messages=2))
    changelog.require_incarnation(IncarnationReason.START)
    begin(changelog)
    for name in range(4):
        changelog.record(stored(name))
        flush(changelog)
    assert changelog.incarnation_due is IncarnationReason.OVERFLOW
    begin(changelog)
    assert changelog.incarnation_due is None
    assert changelog.ledger.digest.blocks == 4


@pytest.mark.anyio
async def test_after_an_overflow_the_old_incarnation_can_withdraw_what_it_claims() -> None:
    changelog = new_changelog(OutboxLimits(outbox_messages=2))
    changelog.require_incarnation(IncarnationReason.START)
    begin(changelog)
    assert not changelog.withdraw(NOW_US), "nothing was lost"
    changelog.require_incarnation(IncarnationReason.REQUESTED)
    assert not changelog.withdraw(NOW_US), "nothing was lost"
    for name in range(4):
        changelog.record(stored(name))
        flush(changelog)
    assert changelog.withdraw(NOW_US) and not changelog.withdraw(NOW_US)
    changelog.record(stored(5))
    assert flush(changelog) == 0
    index = MemoryIndex(partitions=1)
    await index.apply(0, [PartitionBatch(0, [decode_raw(payload) for payload in drain(changelog)])])
    assert await index.digest("w") == Digest().words
    begin(changelog)
    assert not changelog.withdraw(NOW_US)
    await index.apply(0, [PartitionBatch(0, [decode_raw(payload) for payload in drain(changelog)])])
    assert await index.digest("w") == changelog.ledger.digest.words and changelog.ledger.digest.blocks == 5


def test_starting_over_begins_with_an_empty_cache() -> None:
    changelog = new_changelog()
    changelog.require_incarnation(IncarnationReason.START)
    begin(changelog)
    changelog.record(stored(1))
    flush(changelog)
    changelog.record(stored(2))
    changelog.start_over(NOW_US)
    assert changelog.incarnation_due is IncarnationReason.STARTED_OVER
    changelog.record(stored(3))
    begin(changelog)
    assert changelog.ledger.digest.blocks == 1


def test_starting_over_before_the_first_incarnation_begins_none() -> None:
    changelog = new_changelog()
    changelog.start_over(NOW_US)
    assert changelog.incarnation_due is None


def test_incarnations_are_above_the_saved_and_the_requested_one() -> None:
    changelog = new_changelog(saved=1 << 62)
    changelog.require_incarnation(IncarnationReason.START)
    number = changelog.next_incarnation(NOW_US)
    assert number > 1 << 62
    assert changelog.request_snapshot(number + 5)
    assert not changelog.begin_incarnation(number, NOW_US), "asked to be above it meanwhile"
    begin(changelog)
    assert changelog.outbox.incarnation > number + 5
    assert not changelog.request_snapshot(number + 5), "it is above it already"
    assert changelog.incarnation_due is None


def test_a_request_that_leaves_no_number_is_refused() -> None:
    changelog = new_changelog()
    with pytest.raises(InvalidValue, match="no 64-bit number"):
        changelog.request_snapshot((1 << 64) - 1)
    changelog.require_incarnation(IncarnationReason.START)
    begin(changelog)


def test_a_request_before_the_start_only_raises_the_number() -> None:
    changelog = new_changelog()
    assert changelog.request_snapshot(1 << 62)
    assert changelog.incarnation_due is None
    assert changelog.next_incarnation(NOW_US) > 1 << 62


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(40))
async def test_the_index_ends_with_what_the_ledger_announces(seed: int) -> None:
    """Random engine events, folds, requests, overflows and fresh starts, read through the index's fence."""
    rng = random.Random(seed)
    changelog = new_changelog(OutboxLimits(outbox_messages=6, message_bytes=2500))
    changelog.require_incarnation(IncarnationReason.START)
    index = MemoryIndex(1)
    held: list[int] = []

    async def apply() -> None:
        for payload in drain(changelog):
            applied = await index.apply(0, [PartitionBatch(0, [decode_raw(payload)])])
            assert (applied.applied, applied.failed_checks) == (1, 0)

    for step in range(150):
        match rng.randrange(12):
            case 0 | 1 | 2 | 3:
                changelog.record(stored(step))
                held.append(step)
            case 4 | 5 if held:
                changelog.record(EngineBatch([EngineRemoved([held.pop(rng.randrange(len(held)))])]))
            case 6 | 7 | 8:
                flush(changelog)
            case 9:
                await apply()
            case 10 if changelog.incarnation_due is not None or rng.random() < 0.2:
                changelog.require_incarnation(IncarnationReason.REQUESTED)
                begin(changelog)
            case 11 if rng.random() < 0.1:
                changelog.start_over(NOW_US)
                held.clear()
            case 11:
                flush(changelog)
                changelog.checkpoint(NOW_US)
    flush(changelog)
    if changelog.incarnation_due is not None:
        begin(changelog)
    changelog.checkpoint(NOW_US)
    if changelog.incarnation_due is not None:
        begin(changelog)
    await apply()
    assert changelog.flushed
    assert await index.digest("w") == changelog.ledger.digest.words
    assert changelog.ledger.digest.blocks == len(held)


def test_counters_count_blocks_by_change() -> None:
    counters = PublisherCounters()
    changelog = Changelog("w", Ledger(LedgerSettings("model", "model", block_size=4)), counters)
    changelog.require_incarnation(IncarnationReason.START)
    begin(changelog)
    changelog.record(stored(1))
    flush(changelog)
    changelog.record(EngineBatch([EngineRemoved([1], Tier.HBM)]))
    events = changelog.fold()
    assert [type(event) for event in events] == [Removed]
    changelog.publish(events, NOW_US, 0.0)
    assert (counters.blocks_stored, counters.blocks_removed) == (1, 1)
