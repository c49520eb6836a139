"""Marks in each implementation of the index: which workers can resume a chain, which damage is found, and that nothing is left
behind."""

from random import Random

import msgpack
import pytest

from kvatlas.blocks.hashing import extend_chain, unpack_hashes
from kvatlas.bus import wire
from kvatlas.bus.partition_batch import PartitionBatch
from kvatlas.bus.subjects import partition_of
from kvatlas.events import Checkpoint, Marked
from kvatlas.identity import Scope, shard_of
from kvatlas.index.mark_lookup import HEAD_SUFFIX, SEGMENT
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import RedisIndex
from tests.kvatlas.index.damage import Damage
from tests.kvatlas.index.message_source import MessageSource, apply_messages, split

pytestmark = pytest.mark.anyio

SCOPE = Scope("model", "tokenizer")
LENGTH = 400
TRUNK = extend_chain(range(LENGTH), 1)


def branch(at: int) -> bytes:
    """A chain that leaves the trunk at a block."""
    return TRUNK[: 8 * at] + extend_chain(range(9_000 + at, 9_000 + LENGTH), 1, unpack_hashes(TRUNK)[at - 1])


CHAINS = [TRUNK, *(branch(at) for at in (5, 64, 130, 190, 191, 192, 250, 300, 320))]
PLACES = {key: (keys[i // SEGMENT * SEGMENT], i % SEGMENT) for keys in map(split, CHAINS) for i, key in enumerate(keys)}


def hybrid(worker_id: str, dropped: int = 0) -> MessageSource:
    return MessageSource(worker_id, dropped=dropped, places=PLACES)


def block(number: int) -> bytes:
    return TRUNK[8 * number : 8 * number + 8]


async def reach(index: ResidencyIndex, chain: bytes = TRUNK, **lookup: int) -> dict[str, int]:
    found = await index.overlap(SCOPE, chain, verify=True, **lookup)
    assert found.differences == ()
    return found.reach()


async def test_a_worker_with_marks_resumes_at_its_deepest_mark_and_one_without_at_any_block(
    index: ResidencyIndex,
) -> None:
    full, source = MessageSource("full"), hybrid("w")
    await apply_messages(index, full.begin(1), full.store(SCOPE, TRUNK))
    await apply_messages(index, source.begin(1), source.store(SCOPE, TRUNK))
    assert await reach(index) == {"w": 0}
    await apply_messages(index, source.mark(SCOPE, [block(9), block(199), block(300)]))
    assert await reach(index) == {"w": 301}
    assert await reach(index, TRUNK[: 8 * 250]) == {"w": 200}
    assert await reach(index, TRUNK, limit=299) == {"w": 200}
    assert await reach(index, TRUNK[8 * 64 :], first_index=64, limit=199) == {"w": 0}
    assert await reach(index, TRUNK[8 * 64 :], first_index=64, limit=200) == {"w": 200}
    await apply_messages(index, source.mark(SCOPE, [block(199)], unmark=True))
    assert await reach(index, TRUNK[: 8 * 250]) == {"w": 10}
    assert (await index.overlap(SCOPE, TRUNK)).depths() == {"full": LENGTH, "w": LENGTH}


async def test_each_residency_says_whether_a_prompt_can_be_resumed_behind_it(index: ResidencyIndex) -> None:
    full, source = MessageSource("full"), hybrid("w")
    await apply_messages(index, full.begin(1), full.store(SCOPE, TRUNK))
    await apply_messages(index, source.begin(1), source.store(SCOPE, TRUNK), source.mark(SCOPE, [block(9), block(300)]))
    listed = [residency async for residency in index.snapshot()]
    found = {(one.worker_id, one.sequence_hash.to_bytes(8, "little")): one.resumable for one in listed}
    assert found == {
        **{("full", key): None for key in split(TRUNK)},
        **{("w", key): key in (block(9), block(300)) for key in split(TRUNK)},
    }
    located = await index.locate(SCOPE, int.from_bytes(block(9), "little"))
    assert [(one.worker_id, one.resumable) for one in located] == [("full", None), ("w", True)]


async def test_a_mark_behind_a_dropped_block_means_the_position_before_it(index: ResidencyIndex) -> None:
    source = hybrid("w", dropped=2)
    await apply_messages(
        index, source.begin(1), source.store(SCOPE, TRUNK), source.mark(SCOPE, [block(65), block(100)])
    )
    assert await reach(index, limit=98) == {"w": 64}
    assert await reach(index, limit=99) == {"w": 99}
    assert await reach(index, TRUNK[8 * 64 :], first_index=64, limit=64) == {"w": 64}


async def test_a_mark_of_another_branch_is_not_the_chains(index: ResidencyIndex) -> None:
    source, other = hybrid("w"), branch(70)
    await apply_messages(
        index, source.begin(1), source.store(SCOPE, TRUNK), source.store(SCOPE, CHAINS[3][8 * 130 :], parent=block(129))
    )
    await apply_messages(index, source.mark(SCOPE, [block(66), split(CHAINS[3])[150]]))
    assert await reach(index, other[: 8 * 70]) == {"w": 67}
    assert await reach(index) == {"w": 67}
    assert await reach(index, CHAINS[3]) == {"w": 151}


async def test_clearing_takes_the_marks_and_marks_go_on_counting(index: ResidencyIndex) -> None:
    source = hybrid("w")
    await apply_messages(index, source.begin(1), source.store(SCOPE, TRUNK), source.mark(SCOPE, [block(9)]))
    await apply_messages(index, source.clear())
    assert await index.digest("w") == source.digest_words()
    await apply_messages(index, source.store(SCOPE, TRUNK))
    assert await reach(index) == {"w": 0}
    await apply_messages(index, source.mark(SCOPE, [block(9)]), source.message(Checkpoint(source.digest_words())))
    assert await reach(index) == {"w": 10}
    record = await index.record("w")
    assert record is not None and not record.bad


async def test_a_checkpoint_without_a_mark_that_the_index_has_makes_the_worker_bad(index: ResidencyIndex) -> None:
    source = hybrid("w")
    await apply_messages(index, source.begin(1), source.store(SCOPE, TRUNK), source.mark(SCOPE, [block(9)]))
    source.marks.clear()
    await apply_messages(index, source.message(Checkpoint(source.digest_words())))
    record = await index.record("w")
    assert record is not None and record.bad


async def test_a_worker_that_said_it_has_no_marks_and_sends_one_is_closed(index: ResidencyIndex) -> None:
    source = MessageSource("w")
    await apply_messages(index, source.begin(1), source.store(SCOPE, TRUNK))
    await apply_messages(index, source.message(Marked(SCOPE.scope_id, block(3)), scopes=[SCOPE]))
    record = await index.record("w")
    assert record is not None and record.closed and (await index.overlap(SCOPE, TRUNK)).depths() == {}


async def test_a_new_incarnation_has_its_own_marks_and_a_sweep_leaves_nothing_of_the_old(index: ResidencyIndex) -> None:
    source, other = hybrid("w"), hybrid("other")
    for one in (source, other):
        await apply_messages(index, one.begin(1), one.store(SCOPE, TRUNK), one.mark(SCOPE, [block(9), block(200)]))
    source.marks = {(SCOPE, block(50))}
    await apply_messages(index, source.begin(2))
    assert await reach(index) == {"w": 51, "other": 201}
    for shard in range(index.shards):
        while await index.sweep(shard, 1 << 30):
            pass
    assert await reach(index) == {"w": 51, "other": 201}
    for one in (source, other):
        assert await index.retire(one.worker_id, one.incarnation)
    for shard in range(index.shards):
        while await index.sweep(shard, 1 << 30):
            pass
    assert await leftovers(index) == []


async def leftovers(index: ResidencyIndex) -> list[bytes]:
    """Everything that is stored about marks."""
    if isinstance(index, RedisIndex):
        return [key async for key in index._store.client.scan_iter(match="kva:*mark*")]
    assert isinstance(index, MemoryIndex)
    tables = [shard.table.marks for shard in index._shards]
    values = [*(by_scope for table in tables for by_scope in (table.marks, table.heads))]
    return [number for table in tables for number in table.marked] + [
        k for v in values for one in v.values() for k in one
    ]


async def change_mark(index: ResidencyIndex, field: bytes, value: bytes) -> None:
    """Damage the stored value of a marked block or, with the suffix, of a head."""
    if isinstance(index, RedisIndex):
        key = Damage(index, "w").keys.marks(SCOPE.scope_id)
        await (index._store.client.hset(key, field, value) if value else index._store.client.hdel(key, field))
        return
    assert isinstance(index, MemoryIndex)
    table = index._shards[Damage(index, "w").shard].table.marks
    values = table.heads if field.endswith(HEAD_SUFFIX) and len(field) == 9 else table.marks
    one = values.setdefault(SCOPE.scope_id, {})
    one[field[:8]] = value
    if not value:
        del one[field[:8]]


@pytest.mark.parametrize("what", ["a mark is added", "a mark is lost", "a head is lost", "a head has other bits"])
async def test_damaged_marks_are_found_and_repaired_by_a_snapshot(index: ResidencyIndex, what: str) -> None:
    source = hybrid("w")
    await apply_messages(index, source.begin(1), source.store(SCOPE, TRUNK), source.mark(SCOPE, [block(9)]))
    found = [await index.scrub(shard, 1 << 30) for shard in range(index.shards)]
    assert [one for result in found for one in result.damaged] == []
    number = await Damage(index, "w").number()
    field, value = {
        "a mark is added": (block(20), number),
        "a mark is lost": (block(9), b""),
        "a head is lost": (block(0) + HEAD_SUFFIX, b""),
        "a head has other bits": (block(0) + HEAD_SUFFIX, number + bytes(7) + b"\x01"),
    }[what]
    await change_mark(index, field, value)
    found = [await index.scrub(shard, 1 << 30) for shard in range(index.shards)]
    assert [one for result in found for one in result.damaged] == ["w"]
    if isinstance(index, RedisIndex):
        [counted] = await index.recount(["w"])
        assert not counted.sound
    await apply_messages(index, source.begin(2))
    for shard in range(index.shards):
        while await index.sweep(shard, 1 << 30):
            pass
    if what == "a mark is added":  # the sweep removed it with the old holder's other marks
        assert await reach(index) == {"w": 10}
    found = [await index.scrub(shard, 1 << 30) for shard in range(index.shards)]
    assert [one for result in found for one in result.damaged] == []


@pytest.mark.parametrize("index", ["valkey"], indirect=True)
@pytest.mark.parametrize("garbage", [b"", b"\0", b"\0\xc1", b"\xc1", b"\0" + msgpack.packb(["x"] * 6)])
@pytest.mark.parametrize("entry", ["holders", "marked"])
async def test_what_can_not_be_read_about_a_holder_is_damage_and_stops_no_call(
    index: RedisIndex, entry: str, garbage: bytes
) -> None:
    source, other = hybrid("w"), hybrid("other")
    for one in (source, other):
        await apply_messages(index, one.begin(1), one.store(SCOPE, TRUNK), one.mark(SCOPE, [block(9), block(300)]))
    damage = Damage(index, "w")
    await index._store.client.hset(getattr(damage.keys, entry), await damage.number(), garbage)
    assert (await reach(index))["other"] == 301
    assert len(await index.locate(SCOPE, int.from_bytes(block(9), "little"))) == 2
    found = [await index.scrub(shard, 1 << 30) for shard in range(index.shards)]
    assert [worker_id for result in found for worker_id in result.damaged] == ["w"]
    assert sum(result.checked for result in found) == 2 and all(result.ended for result in found)
    await apply_messages(index, source.mark(SCOPE, [block(200)]), source.begin(2))
    for shard in range(index.shards):
        while await index.sweep(shard, 1 << 30):
            pass
    found = [await index.scrub(shard, 1 << 30) for shard in range(index.shards)]
    assert [worker_id for result in found for worker_id in result.damaged] == []
    assert await reach(index) == {"w": 301, "other": 301}


@pytest.mark.parametrize("index", ["valkey"], indirect=True)
async def test_many_marked_holders_on_polluted_heads_are_found_in_several_calls(index: ResidencyIndex) -> None:
    """More holders than one call looks at, and marks of other branches at every offset of their last segments."""
    random, expected = Random(3), dict[str, int]()
    by_shard: dict[int, list[PartitionBatch]] = {}
    for i in range(80):
        source = hybrid(f"w{i}", dropped=i % 3)
        depth = random.randint(180, LENGTH)
        messages = [source.begin(1), source.store(SCOPE, TRUNK[: 8 * depth])]
        for chain in random.sample(CHAINS[1:], 3):
            keys = split(chain)
            at = next(i for i, key in enumerate(keys) if key != block(i))
            if at < depth:
                messages.append(source.store(SCOPE, chain[8 * at :], parent=keys[at - 1]))
                messages.append(source.mark(SCOPE, keys[at : at + 60]))
        marked = [n for n in random.sample(range(100), 2) if n >= 3]
        if marked and i % 10:
            messages.append(source.mark(SCOPE, [block(n) for n in marked]))
        reached = [n + 1 - (i % 3) for n in marked if i % 10]
        expected[source.worker_id] = max(reached, default=0)
        partition = partition_of(source.worker_id, index.partitions)
        by_shard.setdefault(shard_of(partition, index.shards), []).append(PartitionBatch(partition, messages))
    for shard, batches in by_shard.items():
        for batch in batches:
            assert (await index.apply(shard, [batch])).applied == len(batch.messages)
    assert await reach(index) == expected


def test_events_of_marks_are_of_version_2_and_others_stay_of_version_1() -> None:
    source, full = hybrid("w"), MessageSource("full")
    assert [source.begin(1)[0], source.store(SCOPE, TRUNK)[0], source.mark(SCOPE, [block(3)])[0]] == [2, 1, 2]
    assert [full.begin(1)[0], full.message(Checkpoint(full.digest_words()))[0]] == [wire.VERSION] * 2
