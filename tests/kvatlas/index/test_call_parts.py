"""Large messages reach the store in parts, and each step of a message is applied once, whatever happens between two parts."""

import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks.digest import Digest
from kvatlas.blocks.hashing import HASH_BYTES, pack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.bus import wire
from kvatlas.bus.partition_batch import PartitionBatch
from kvatlas.errors import Unreachable
from kvatlas.events import Cleared, Removed, SnapshotBegin, SnapshotChunk, SnapshotEnd, Stored
from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.redis import apply_call, call_plan
from kvatlas.index.redis.call_plan import Place, cut_call
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.keys import ShardKeys
from kvatlas.store.connection import Store, open_store
from tests.kvatlas.index.message_source import MessageSource, apply_messages, contents

pytestmark = pytest.mark.anyio

SCOPES = [Scope("m", "t"), Scope("m", "t", "lora")]
IDS = [scope.scope_id for scope in SCOPES]
K = ShardKeys(0)


def hashes(first: int, last: int) -> bytes:
    return pack_hashes(range(first, last))


def large_messages() -> list[wire.RawMessage]:
    """A snapshot in three messages, one with every kind of change, and one that clears in its middle."""
    source = MessageSource("w")
    source.seq = -1
    digest = Digest()
    parts = [(IDS[0], hashes(1, 400)), (IDS[1], hashes(1, 300)), (IDS[1], hashes(300, 400)), (IDS[0], hashes(400, 500))]
    for scope_id, packed in parts:
        digest.add(scope_id, Tier.HBM, packed)
    chunks = [SnapshotChunk(scope_id, Tier.HBM, packed) for scope_id, packed in parts]
    return [
        source.message(SnapshotBegin(), *chunks[:2], scopes=SCOPES),
        source.message(*chunks[2:], scopes=SCOPES),
        source.message(SnapshotEnd(len(chunks), digest.words)),
        source.message(
            Stored(IDS[0], Tier.CPU_DRAM, hashes(1, 200)),
            Removed(IDS[0], Tier.HBM, hashes(100, 350)),
            Stored(IDS[0], Tier.HBM, hashes(120, 340)),
            Removed(IDS[1], Tier.HBM, hashes(200, 300)),
            scopes=SCOPES,
        ),
        source.message(
            Stored(IDS[1], Tier.HBM, hashes(900, 1000)),
            Cleared(),
            Stored(IDS[1], Tier.HBM, hashes(1, 150)),
            scopes=SCOPES,
        ),
    ]


@pytest.fixture
async def store(fresh_valkey: str) -> AsyncIterator[Store]:
    opened = await open_store(fresh_valkey, wait=False)
    try:
        yield opened
    finally:
        await opened.close()


async def expected(messages: Sequence[wire.RawMessage]) -> tuple[Any, ...]:
    index = MemoryIndex(shards=1)
    await apply_messages(index, *messages)
    return await contents(index, "w"), await index.digest("w"), await index.record("w")


async def found(index: RedisIndex) -> tuple[Any, ...]:
    return await contents(index, "w"), await index.digest("w"), await index.record("w")


class Interrupted(Exception):
    """The process is killed before its next call."""


def interrupt(index: RedisIndex, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """Interrupt the index after this many calls that apply messages."""
    call, left = index._functions.call, calls

    async def counted(function: str, *what: Any) -> Any:
        nonlocal left
        if function == "kvatlas_apply":
            if not left:
                raise Interrupted
            left -= 1
        return await call(function, *what)

    monkeypatch.setattr(index._functions, "call", counted)


@pytest.mark.parametrize("cost", [70, 300, 600])
async def test_a_large_message_comes_in_parts(store: Store, monkeypatch: pytest.MonkeyPatch, cost: int) -> None:
    monkeypatch.setattr(call_plan, "CALL_COST", cost)
    index, messages = await open_redis_index(store, writer=True), large_messages()
    for number in range(len(messages)):
        result = await apply_messages(index, messages[number])
        assert (result.applied, result.failed_checks) == (1, 0)
        assert await found(index) == await expected(messages[: number + 1])
        assert not await store.client.exists(K.steps)
    again = await apply_messages(index, *messages)
    assert (again.applied, again.duplicates) == (0, len(messages))
    assert await found(index) == await expected(messages)


async def test_another_process_goes_on_after_any_part(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows nothing of the first one, and splits elsewhere."""
    messages = large_messages()
    want = await expected(messages)
    for calls in (2, 6, *range(10, 18), 22, 26, 1_000):
        await store.client.flushall()
        monkeypatch.setattr(call_plan, "CALL_COST", 130)
        first = await open_redis_index(store, writer=True)
        with monkeypatch.context() as patch:
            interrupt(first, patch, calls)
            try:
                await apply_messages(first, *messages)
            except Interrupted:
                pass
            else:
                break
        monkeypatch.setattr(call_plan, "CALL_COST", 170)
        second = await open_redis_index(store, writer=True)
        assert (await apply_messages(second, *messages)).failed_checks == 0
        assert await found(second) == want
        monkeypatch.setattr(call_plan, "CALL_COST", 130)
        assert (await apply_messages(first, *messages)).duplicates == len(messages)  # it was only slow
        assert await found(second) == want
    else:
        pytest.fail("it was never through")


async def test_a_forgotten_worker_leaves_no_steps(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_plan, "CALL_COST", 130)
    index = await open_redis_index(store, writer=True)
    with monkeypatch.context() as patch:
        interrupt(index, patch, 2)
        with pytest.raises(Interrupted):
            await apply_messages(index, *large_messages())
    assert await store.client.exists(K.steps)
    assert await index.retire("w", 1) and await index.forget("w", 1)
    assert not await store.client.exists(K.steps)


async def test_a_part_that_is_missing_is_a_gap(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a server that did not get it had taken over."""
    monkeypatch.setattr(call_plan, "CALL_COST", 130)
    index, messages = await open_redis_index(store, writer=True), large_messages()
    await apply_messages(index, *messages[:3])
    interrupted = await open_redis_index(store, writer=True)
    call, parts = interrupted._functions.call, 0

    async def losing(function: str, *what: Any) -> Any:
        nonlocal parts
        answer = await call(function, *what)
        if function == "kvatlas_apply":
            parts += 1
            if parts == 2:
                await store.client.delete(K.steps)
        return answer

    monkeypatch.setattr(interrupted._functions, "call", losing)
    result = await apply_messages(interrupted, messages[3])
    assert (result.applied, result.gaps) == (0, 1)
    record = await index.record("w")
    assert record is not None and (record.seq, record.want) == (2, (1, 3))


async def test_parts_of_another_incarnation_or_message_do_not_count(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_plan, "CALL_COST", 130)
    index = await open_redis_index(store, writer=True)
    with monkeypatch.context() as patch:
        interrupt(index, patch, 18)
        with pytest.raises(Interrupted):
            await apply_messages(index, *large_messages())
    stored = await store.client.hget(K.steps, "w")
    assert stored is not None
    begun_seq = int(stored[8:].split()[0])
    later = MessageSource("w")
    messages = [later.begin(2)]
    while later.seq < begun_seq + 1:
        first, large = (
            2_000 * later.seq + 1,
            later.seq + 1 >= begun_seq,
        )  # a large one before would replace what is left
        messages.append(later.store(SCOPES[0], hashes(first, first + (400 if large else 1))))
    await apply_messages(index, *messages[:-1])
    assert await contents(index, "w") == (await expected(messages[:-1]))[0]
    await store.client.hset(K.steps, "w", (2).to_bytes(8, "big") + b"%d 100" % begun_seq)  # left by another version
    await apply_messages(index, messages[-1])
    assert await found(index) == await expected(messages)


@pytest.mark.parametrize("closing", [SnapshotEnd(0, Digest().words), SnapshotBegin()])
async def test_a_part_that_closes_the_worker_ends_the_message(
    store: Store, monkeypatch: pytest.MonkeyPatch, closing: SnapshotBegin | SnapshotEnd
) -> None:
    monkeypatch.setattr(call_plan, "CALL_COST", 130)
    index = await open_redis_index(store, writer=True)
    source = MessageSource("w")
    stores = [Stored(IDS[0], Tier.HBM, hashes(at, at + 300)) for at in (1, 301)]
    messages = [source.begin(1), source.message(stores[0], closing, stores[1], scopes=SCOPES[:1])]
    await apply_messages(index, *messages)
    assert await found(index) == await expected(messages)
    assert not await store.client.exists(K.steps)


async def test_values_that_turn_out_long_make_calls_smaller(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    index = await open_redis_index(store, writer=True)
    rng = random.Random(3)
    for number in range(40):
        source = MessageSource(f"w{number}")
        await apply_messages(
            index, source.begin(1), source.store(SCOPES[0], pack_hashes(rng.sample(range(1, 2_001), 1_000)))
        )
    sizes: list[int] = []
    pack = apply_call.pack_call

    def noted(reuse_ms: int, most_cost: float, call: Any, **more: Any) -> Any:
        sizes.append(sum(len(m.events[0][wire.HASHES]) // HASH_BYTES for batch in call for m in batch.messages))
        return pack(reuse_ms, most_cost, call, **more)

    fresh = await open_redis_index(store, writer=True)
    await apply_messages(fresh, MessageSource("late").begin(1))
    monkeypatch.setattr("kvatlas.index.redis.index.pack_call", noted)
    late = MessageSource("late")
    late.seq = 0
    await apply_messages(fresh, late.store(SCOPES[0], hashes(1, 2_001)))
    assert sizes[0] > 300  # nothing is known about the values: the store refuses it
    assert sum(sizes[1:]) == 2_000 and max(sizes[1:]) < 250
    assert await contents(fresh, "late") == late.held


async def test_an_unreachable_store_in_the_middle_is_raised(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call_plan, "CALL_COST", 130)
    index = await open_redis_index(store, writer=True)

    async def away(*_: Any) -> Any:
        raise Unreachable("away")

    monkeypatch.setattr(index._functions, "call", away)
    with pytest.raises(Unreachable):
        await apply_messages(index, *large_messages())


@given(
    sizes=st.lists(
        st.lists(st.integers(0, 300), min_size=1, max_size=6).filter(lambda events: events.count(0) < 2),
        min_size=1,
        max_size=6,
    ),
    weight=st.floats(1, 40),
)
def test_calls_have_every_step_once_and_in_order(sizes: list[list[int]], weight: float) -> None:
    source, number = MessageSource("w"), 0
    messages = []
    for events in sizes:
        stored = []
        for size in events:
            stored.append(Stored(IDS[0], Tier.HBM, hashes(number + 1, number + size + 1)) if size else Cleared())
            number += size
        messages.append(source.message(*stored, scopes=SCOPES[:1]))
    batches = [PartitionBatch(0, messages[:2]), PartitionBatch(1, messages[2:])]
    place: Place | None = Place()
    steps: list[tuple[int, bytes | None]] = []
    complete: list[int] = []
    while place is not None:
        call, place = cut_call(batches, place, {IDS[0]: weight})
        blocks = 0
        for part in call:
            complete += [part.batch.partition] if part.complete else []
            for message in part.messages:
                these = _steps(message.raw[wire.SEQ], message.events)
                blocks += sum(key is not None for _, key in these)
                steps += these
        assert blocks * weight <= max(call_plan.CALL_COST, call_plan.WHOLE_STEPS * weight)
    every = [step for message in messages for step in _steps(message[wire.SEQ], message[wire.EVENTS])]
    assert steps == every
    assert complete == [0, 1]


def _steps(seq: int, events: Sequence[list[Any]]) -> list[tuple[int, bytes | None]]:
    """A message's steps, one per hash; None for an event without hashes."""
    steps: list[tuple[int, bytes | None]] = []
    for event in events:
        packed = event[wire.HASHES] if event[wire.CODE] == wire.STORED else b""
        steps += [(seq, packed[at : at + HASH_BYTES]) for at in range(0, len(packed), HASH_BYTES)] or [(seq, None)]
    return steps


async def test_a_scope_is_in_a_holders_list_once(store: Store) -> None:
    index, source = await open_redis_index(store, writer=True), MessageSource("w")
    await apply_messages(index, source.begin(1), source.store(SCOPES[0], hashes(1, 3)))
    for first in (5, 9):
        await apply_messages(index, source.store(SCOPES[0], hashes(first, first + 2)))
    await apply_messages(index, source.store(SCOPES[1], hashes(1, 3)), source.store(SCOPES[1], hashes(5, 7)))
    [touched] = (await store.client.hgetall(K.touched)).values()
    assert [touched[at : at + 8] for at in range(0, len(touched), 16)] == IDS
