"""The promises of every residency index, tested on each implementation."""

from dataclasses import replace

import pytest

from kvatlas.blocks.digest import Digest
from kvatlas.blocks.hashing import HASH_BYTES, extend_chain, unpack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.partition_batch import PartitionBatch, Position
from kvatlas.bus.subjects import partition_of
from kvatlas.events import Checkpoint, Removed, ScopeUse, SnapshotBegin, SnapshotChunk, SnapshotEnd, Stored
from kvatlas.identity import Scope, shard_of
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import RedisIndex
from kvatlas.index.sqlite.index import SqliteIndex
from tests.kvatlas.index.message_source import BLOCK_BYTES, MessageSource, apply_messages, contents

pytestmark = pytest.mark.anyio

SCOPE = Scope("model", "tokenizer")
CHAIN = extend_chain(range(4 * 300), 4)
USE = ScopeUse(SCOPE, 4, BLOCK_BYTES)


def head(blocks: int) -> bytes:
    return CHAIN[: blocks * HASH_BYTES]


def tail(blocks: int) -> bytes:
    return CHAIN[-blocks * HASH_BYTES :]


async def test_overlap_is_each_workers_depth(index: ResidencyIndex) -> None:
    for worker, blocks in (("a", 300), ("b", 1), ("c", 77), ("d", 77)):
        source = MessageSource(worker)
        await apply_messages(index, source.begin(1), source.store(SCOPE, head(blocks)))
    found = await index.overlap(SCOPE, CHAIN, verify=True)
    assert found.depths() == {"a": 300, "b": 1, "c": 77, "d": 77}
    assert found.differences == ()
    assert (await index.overlap(SCOPE, head(50))).depths() == {"a": 50, "b": 1, "c": 50, "d": 50}
    assert (await index.overlap(SCOPE, tail(10))).depths() == {"a": 10}
    assert (await index.overlap(SCOPE, b"")).depths() == {}
    assert (await index.overlap(SCOPE, extend_chain(range(7, 4 * 50), 4))).depths() == {}


async def test_a_tier_is_part_of_a_residency(index: ResidencyIndex) -> None:
    source = MessageSource("w")
    await apply_messages(
        index,
        source.begin(1),
        source.store(SCOPE, head(10)),
        source.store(SCOPE, head(4), Tier.CPU_DRAM),
        source.remove(SCOPE, head(2)),
    )
    assert await contents(index, "w") == source.held
    assert await index.length() == 12
    flags = (await index.overlap(SCOPE, head(10))).runs_of("w")
    assert flags[0] == (2, Tier.CPU_DRAM.flag)
    assert flags[-1][1] == Tier.HBM.flag
    found = await index.locate(SCOPE, unpack_hashes(CHAIN)[3])
    assert [(r.worker_id, r.tier, r.bytes, r.pinned) for r in found] == [
        ("w", Tier.HBM, BLOCK_BYTES, False),
        ("w", Tier.CPU_DRAM, BLOCK_BYTES, False),
    ]


async def test_a_replayed_batch_changes_nothing(index: ResidencyIndex) -> None:
    source = MessageSource("w")
    messages = [source.begin(1), source.store(SCOPE, head(20)), source.remove(SCOPE, CHAIN[8 * 10 : 8 * 20])]
    await apply_messages(index, *messages)
    digest = await index.digest("w")
    again = await apply_messages(index, *messages)
    assert (again.applied, again.duplicates) == (0, 3)
    assert await index.digest("w") == digest == source.digest().words
    assert await contents(index, "w") == source.held


async def test_a_batch_that_overlaps_what_was_applied_is_applied_once(index: ResidencyIndex) -> None:
    source = MessageSource("w")
    begin = source.begin(1)
    stores = [source.store(SCOPE, CHAIN[8 * i : 8 * (i + 1)]) for i in range(6)]
    await apply_messages(index, begin, *stores[:3])
    result = await apply_messages(index, *stores)
    assert (result.applied, result.duplicates) == (3, 3)
    assert await contents(index, "w") == source.held
    assert await index.digest("w") == source.digest().words


async def test_a_message_after_a_gap_is_not_applied_and_is_remembered(index: ResidencyIndex) -> None:
    source = MessageSource("w")
    await apply_messages(index, source.begin(1), source.store(SCOPE, head(5)))
    source.store(SCOPE, CHAIN[8 * 5 : 8 * 6])  # lost
    result = await apply_messages(index, source.store(SCOPE, CHAIN[8 * 6 : 8 * 7]))
    assert (result.applied, result.gaps) == (0, 1)
    record = await index.record("w")
    assert record is not None
    assert (record.seq, record.want) == (1, (1, 3))
    assert (await index.overlap(SCOPE, CHAIN)).depths() == {"w": 5}
    await apply_messages(index, source.begin(2))
    assert await contents(index, "w") == source.held


async def test_a_zombie_of_an_older_incarnation_changes_nothing(index: ResidencyIndex) -> None:
    zombie, source = MessageSource("w"), MessageSource("w")
    await apply_messages(index, zombie.begin(1), zombie.store(SCOPE, head(5)))
    await apply_messages(index, source.begin(1 << 63), source.store(SCOPE, head(2)))
    result = await apply_messages(index, zombie.store(SCOPE, CHAIN[8 * 5 : 8 * 9]), zombie.clear())
    assert (result.applied, result.stale) == (0, 2)
    assert await contents(index, "w") == source.held


async def test_a_higher_incarnation_must_begin_with_a_snapshot(index: ResidencyIndex) -> None:
    source = MessageSource("w")
    await apply_messages(index, source.begin(1), source.store(SCOPE, head(5)))
    late = MessageSource("w", incarnation=9)
    late.seq = 3
    result = await apply_messages(index, late.store(SCOPE, head(9)))
    assert (result.applied, result.gaps) == (0, 1)
    record = await index.record("w")
    assert record is not None
    assert (record.incarnation, record.want) == (1, (9, 4))


async def test_a_snapshot_answers_only_when_it_is_complete(index: ResidencyIndex) -> None:
    source = MessageSource("w")
    await apply_messages(index, source.begin(1), source.store(SCOPE, head(5)))
    new = MessageSource("w", incarnation=2)
    chunk = SnapshotChunk(SCOPE.scope_id, Tier.HBM, head(8))
    await apply_messages(index, new.message(SnapshotBegin()), new.message(chunk, scopes=[SCOPE]))
    assert (await index.overlap(SCOPE, CHAIN)).depths() == {"w": 5}
    digest = Digest()
    digest.add(SCOPE.scope_id, Tier.HBM, head(8))
    await apply_messages(index, new.message(SnapshotEnd(1, digest.words)))
    assert (await index.overlap(SCOPE, CHAIN)).depths() == {"w": 8}


async def test_what_a_worker_claims_includes_a_snapshot_under_way(index: ResidencyIndex) -> None:
    source, other = MessageSource("w"), MessageSource("other")
    await apply_messages(
        index, source.begin(1), source.store(SCOPE, head(10)), source.store(SCOPE, head(4), Tier.CPU_DRAM)
    )
    await apply_messages(index, other.begin(1))
    assert await index.claimed(["w", "other", "unknown"]) == {"w": 14, "other": 0}
    snapshot = MessageSource("w", 2)
    chunk = SnapshotChunk(SCOPE.scope_id, Tier.HBM, head(8))
    await apply_messages(index, snapshot.message(SnapshotBegin()), snapshot.message(chunk, scopes=[SCOPE]))
    assert await index.claimed(["w"]) == {"w": 14}, "a snapshot repeats what the worker has"
    more = SnapshotChunk(SCOPE.scope_id, Tier.CPU_DRAM, head(9))
    await apply_messages(index, snapshot.message(more, scopes=[SCOPE]))
    assert await index.claimed(["w"]) == {"w": 17}


@pytest.mark.parametrize("wrong", ["count", "digest"])
async def test_a_wrong_snapshot_closes_the_incarnation_and_the_old_one_answers(
    index: ResidencyIndex, wrong: str
) -> None:
    source = MessageSource("w")
    await apply_messages(index, source.begin(1), source.store(SCOPE, head(5)))
    new = MessageSource("w", incarnation=2)
    digest = Digest()
    digest.add(SCOPE.scope_id, Tier.HBM, head(8 if wrong == "count" else 7))
    result = await apply_messages(
        index,
        new.message(SnapshotBegin()),
        new.message(SnapshotChunk(SCOPE.scope_id, Tier.HBM, head(8)), scopes=[SCOPE]),
        new.message(SnapshotEnd(2 if wrong == "count" else 1, digest.words)),
        new.store(SCOPE, CHAIN[8 * 8 : 8 * 9]),
    )
    assert (result.failed_checks, result.refused) == (1, 1)
    record = await index.record("w")
    assert record is not None
    assert (record.bad, record.closed, record.answering) == (True, True, True)
    assert (await index.overlap(SCOPE, CHAIN)).depths() == {"w": 5}
    source.held = {}
    await apply_messages(index, source.begin(3))
    assert (await index.overlap(SCOPE, CHAIN)).depths() == {}


async def test_blocks_repeated_by_several_events_count_once(index: ResidencyIndex) -> None:
    """No publisher does this, but the digest is that of the set all the same."""
    source = MessageSource("w")
    scope_id = SCOPE.scope_id
    repeated = head(4) + head(2)
    stores = [Stored(scope_id, Tier.HBM, part) for part in (head(3), repeated, head(6))]
    await apply_messages(index, source.begin(1), source.message(*stores, scopes=[SCOPE]))
    digest = Digest()
    digest.add(scope_id, Tier.HBM, head(6))
    assert await index.digest("w") == digest.words
    removals = [Removed(scope_id, Tier.HBM, part) for part in (head(6)[16:], head(6)[8:], repeated)]
    await apply_messages(index, source.message(*removals, scopes=[SCOPE]))
    assert await index.digest("w") == Digest().words
    assert await index.length() == 0


async def test_a_checkpoint_that_differs_makes_the_worker_bad(index: ResidencyIndex) -> None:
    source = MessageSource("w")
    good = await apply_messages(
        index, source.begin(1), source.store(SCOPE, head(5)), source.message(Checkpoint(source.digest().words))
    )
    assert good.failed_checks == 0
    source.held.popitem()
    bad = await apply_messages(index, source.message(Checkpoint(source.digest().words)))
    assert bad.failed_checks == 1
    record = await index.record("w")
    assert record is not None
    assert (record.bad, record.closed) == (True, False)


async def test_cleared_takes_effect_at_once_and_the_sweep_gives_back_the_memory(index: ResidencyIndex) -> None:
    other, source = MessageSource("other"), MessageSource("w")
    await apply_messages(index, other.begin(1), other.store(SCOPE, head(5)))
    await apply_messages(
        index, source.begin(1), source.store(SCOPE, CHAIN), source.clear(), source.store(SCOPE, head(2))
    )
    assert (await index.overlap(SCOPE, CHAIN)).depths() == {"w": 2, "other": 5}
    assert await index.digest("w") == source.digest().words
    for shard in range(index.shards):
        assert await index.sweep(shard, 1_000_000) == 0
    assert await contents(index, "w") == source.held
    assert await contents(index, "other") == other.held
    assert await index.length() == 7


async def test_retiring_is_for_one_incarnation_and_closes_it(index: ResidencyIndex) -> None:
    source = MessageSource("w")
    await apply_messages(index, source.begin(5), source.store(SCOPE, head(5)))
    assert not await index.retire("w", 4)
    assert not await index.retire("nobody", 4)
    assert await index.retire("w", 5)
    assert not await index.retire("w", 5)
    assert await index.length() == 0
    result = await apply_messages(index, source.store(SCOPE, CHAIN[8 * 5 : 8 * 6]))
    assert result.refused == 1
    await apply_messages(index, source.begin(6))
    assert (await index.overlap(SCOPE, CHAIN)).depths() == {"w": 6}


async def test_only_a_closed_worker_that_holds_nothing_is_forgotten(index: ResidencyIndex) -> None:
    source = MessageSource("w")
    await apply_messages(index, source.begin(5), source.store(SCOPE, head(5)))
    assert not await index.forget("w", 5)
    assert not await index.forget("nobody", 5)
    assert await index.retire("w", 5)
    assert not await index.forget("w", 4)
    assert await index.forget("w", 5)
    assert await index.record("w") is None
    late = await apply_messages(index, source.store(SCOPE, CHAIN[8 * 5 : 8 * 6]))
    assert late.applied == 0 and await index.length() == 0
    await apply_messages(index, source.begin(6))
    assert (await index.overlap(SCOPE, CHAIN)).depths() == {"w": 6}


async def test_a_scope_is_forgotten_when_no_block_of_it_is_left(index: ResidencyIndex) -> None:
    source, gone = MessageSource("w"), Scope("model", "tokenizer", None, "gone")
    await apply_messages(index, source.begin(1), source.store(SCOPE, head(5)), source.store(gone, head(5)))
    assert await index.forget_scopes(0.0) == 0
    await apply_messages(index, source.remove(gone, head(5)))
    assert await index.forget_scopes(0.0) == 1
    assert await index.forget_scopes(0.0) == 0
    assert await contents(index, "w") == source.held
    assert (await index.scrub(0, 1 << 30)).damaged == []


async def test_direct_writes_add_remove_and_clear(index: ResidencyIndex) -> None:
    await index.put(USE, "w", Tier.LOCAL_SSD, head(5), pinned=True)
    await index.put(USE, "w", Tier.HBM, CHAIN[8 * 5 : 8 * 7], parent=unpack_hashes(CHAIN)[4], first_index=5)
    assert (await index.overlap(SCOPE, CHAIN)).depths() == {"w": 7}
    assert all(r.pinned for r in await index.locate(SCOPE, unpack_hashes(CHAIN)[0]))
    await index.remove(SCOPE, "w", Tier.HBM, CHAIN[8 * 5 : 8 * 7])
    assert (await index.overlap(SCOPE, CHAIN)).depths() == {"w": 5}
    await index.clear_worker("w")
    assert await index.length() == 0
    await index.put(USE, "w", Tier.HBM, head(1))
    assert await index.length() == 1


async def test_children_are_the_blocks_behind_a_prefix(index: ResidencyIndex) -> None:
    hashes = unpack_hashes(CHAIN)
    fork = extend_chain(range(900, 904), 4, parent=hashes[1])
    source = MessageSource("w")
    await apply_messages(
        index,
        source.begin(1),
        source.store(SCOPE, head(3)),
        source.store(SCOPE, fork, parent=CHAIN[8:16]),
    )
    other = MessageSource("v")
    await apply_messages(index, other.begin(1), other.store(SCOPE, head(1), Tier.CPU_DRAM))
    children = await index.children(SCOPE, None)
    assert [(r.sequence_hash, r.worker_id, r.tier, r.bytes) for r in children] == [
        (hashes[0], "v", Tier.CPU_DRAM, BLOCK_BYTES),
        (hashes[0], "w", Tier.HBM, BLOCK_BYTES),
    ]
    both = sorted([hashes[2], *unpack_hashes(fork)])
    assert [r.sequence_hash for r in await index.children(SCOPE, hashes[1])] == both
    await apply_messages(index, source.remove(SCOPE, fork))
    assert [r.sequence_hash for r in await index.children(SCOPE, hashes[1])] == [hashes[2]]
    assert await index.children(SCOPE, hashes[2]) == []


async def test_metrics_count_what_changed(index: ResidencyIndex) -> None:
    source = MessageSource("w")
    before = index.work
    await apply_messages(
        index, source.begin(1), source.store(SCOPE, head(10)), source.remove(SCOPE, CHAIN[8 * 7 : 8 * 10])
    )
    await index.overlap(SCOPE, CHAIN)
    size, now = await index.metrics(), index.work
    assert (size.resident_blocks, size.resident_bytes) == (7, 7 * BLOCK_BYTES)
    assert (now.puts - before.puts, now.removes - before.removes, now.prefix_scans - before.prefix_scans) == (10, 3, 1)
    written = now.bytes_written - before.bytes_written
    if index.name == "redis":
        assert written == 10 * (8 + 4)
    else:
        assert written > 0 if index.persistent else written == 0
    await index.clear()
    cleared = index.work
    assert cleared == replace(now, bytes_written=cleared.bytes_written)
    assert cleared.bytes_written >= now.bytes_written


async def test_clear_forgets_everything(index: ResidencyIndex) -> None:
    source = MessageSource("w")
    await apply_messages(index, source.begin(1), source.store(SCOPE, head(10)))
    await index.set_position(3, None, Position(7, 9))
    await index.clear()
    assert await index.length() == 0
    assert await index.record("w") is None
    assert await index.position(3) is None


async def test_a_position_is_compared_before_it_is_moved(index: ResidencyIndex) -> None:
    source = MessageSource("w")
    partition = partition_of("w", index.partitions)
    shard = shard_of(partition, index.shards)
    first = PartitionBatch(partition, [source.begin(1)], Position(70, 10), after_seq=5)
    assert (await index.apply(shard, [first])).moved == (partition,)  # no position yet
    assert await index.record("w") is None
    assert await index.set_position(partition, None, Position(70, 5)) == Position(70, 5)
    assert (await index.apply(shard, [first])).applied == 1
    assert await index.position(partition) == Position(70, 10)
    assert (await index.apply(shard, [first])).duplicates == 1
    behind = PartitionBatch(partition, [source.store(SCOPE, head(3))], Position(70, 30), after_seq=20)
    assert (await index.apply(shard, [behind])).moved == (partition,)  # the store lost its last writes
    other = PartitionBatch(partition, [], Position(71, 11))
    assert (await index.apply(shard, [other])).moved == (partition,)  # another stream
    assert await index.set_position(partition, Position(1, 1), Position(71, 0)) == Position(70, 10)
    assert await index.set_position(partition, Position(70, 10), Position(71, 0)) == Position(71, 0)
    record = await index.record("w")
    assert record is not None
    assert record.bad


async def test_one_call_takes_several_partitions_and_workers(index: ResidencyIndex) -> None:
    workers = [f"w{i}" for i in range(40)]
    sources = {worker: MessageSource(worker) for worker in workers}
    by_shard: dict[int, list[PartitionBatch]] = {}
    for i, (worker, source) in enumerate(sources.items()):
        partition = partition_of(worker, index.partitions)
        messages = [source.begin(1), source.store(SCOPE, head(i + 1))]
        by_shard.setdefault(shard_of(partition, index.shards), []).append(PartitionBatch(partition, messages))
    for shard, batches in by_shard.items():
        assert (await index.apply(shard, batches)).applied == 2 * len(batches)
    found = await index.overlap(SCOPE, CHAIN, verify=True)
    assert found.depths() == {f"w{i}": i + 1 for i in range(40)}
    assert found.differences == ()
    records = [record for shard in range(index.shards) for record in await index.records(shard)]
    assert {record.worker_id for record in records} == set(workers)


async def test_a_repeated_hash_counts_once(index: ResidencyIndex) -> None:
    source = MessageSource("w")
    await apply_messages(
        index, source.begin(1), source.store(SCOPE, head(3) + head(2)), source.remove(SCOPE, head(1) + head(1))
    )
    assert await index.digest("w") == source.digest().words
    assert await contents(index, "w") == source.held


async def test_a_removal_from_all_tiers_says_how_many_residencies_it_took(index: ResidencyIndex) -> None:
    assert await index.is_empty()
    await index.put(USE, "w", Tier.HBM, head(5))
    await index.put(USE, "w", Tier.CPU_DRAM, head(2))
    assert not await index.is_empty()
    assert await index.remove(SCOPE, "w", None, CHAIN[8:40]) == 4 + 1
    assert await index.remove(SCOPE, "w", Tier.LOCAL_SSD, head(1)) == 0
    assert await index.remove(SCOPE, "w", None, head(1)) == 2
    assert await index.is_empty()


async def test_an_index_says_its_name(index: ResidencyIndex) -> None:
    names: dict[type, str] = {MemoryIndex: "memory", RedisIndex: "redis", SqliteIndex: "sqlite"}
    assert index.name == names[type(index)]
    assert index.persistent is (index.name != "memory")
