"""The scrub finds damage that came from no message, in each implementation; a snapshot and a sweep repair it."""

import pytest

from kvatlas.blocks.digest import WORDS, Digest
from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.subjects import partition_of
from kvatlas.events import ScopeUse
from kvatlas.identity import Scope, shard_of
from kvatlas.index.protocol import ResidencyIndex, ScrubResult
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.index.redis.keys import SCOPES
from kvatlas.index.redis.recount import CALL_COST
from tests.kvatlas.index.damage import Damage
from tests.kvatlas.index.message_source import MessageSource, apply_messages, contents

pytestmark = pytest.mark.anyio

SCOPE, OTHER = Scope("model", "tokenizer"), Scope("model", "tokenizer", "adapter")
BLOCKS = 4 * CALL_COST
NO_TIER = 1 << 6
"""A bit of an entry that no tier has."""
CHAIN = extend_chain(range(4 * BLOCKS), 4)
NEVER = extend_chain(range(900_000, 900_004), 4)


def block(number: int) -> bytes:
    return CHAIN[8 * number : 8 * number + 8]


async def whole_round(index: ResidencyIndex) -> ScrubResult:
    """One round of every shard."""
    found = [await index.scrub(shard, 1 << 30) for shard in range(index.shards)]
    return ScrubResult(
        sum(one.checked for one in found),
        [worker_id for one in found for worker_id in one.damaged],
        sum(one.strays for one in found),
        sum(one.given_up for one in found),
        all(one.ended for one in found),
    )


@pytest.fixture
async def sources(index: ResidencyIndex) -> dict[str, MessageSource]:
    """Workers that share blocks, in two scopes and two tiers."""
    made = {worker: MessageSource(worker) for worker in ("a", "b", "c")}
    for worker, source in made.items():
        await apply_messages(
            index,
            source.begin(1),
            source.store(SCOPE, CHAIN[: 8 * (BLOCKS if worker == "a" else 40)]),
            source.store(SCOPE, CHAIN[: 8 * 20], Tier.CPU_DRAM),
            source.store(OTHER, CHAIN[: 8 * 10]),
        )
    return made


async def test_changes_by_messages_are_no_damage(index: ResidencyIndex, sources: dict[str, MessageSource]) -> None:
    await apply_messages(index, sources["b"].clear())
    assert await whole_round(index) == ScrubResult(3, [], 0, 0, True)
    for worker in sources:
        record = await index.record(worker)
        assert record is not None and not record.bad


DAMAGES = {
    "a block is added": lambda damage: damage.add(SCOPE, NEVER),
    "a block is added to another's": lambda damage: damage.add(SCOPE, block(1_000)),
    "a block is added in a scope that the worker never used": lambda damage: damage.add(Scope("other", "other"), NEVER),
    "a block is removed": lambda damage: damage.take(SCOPE, block(7)),
    "a tier is lost": lambda damage: damage.change_flags(SCOPE, block(7), Tier.HBM.flag),
    "a bit of no tier is set": lambda damage: damage.change_flags(SCOPE, block(30), Tier.HBM.flag | NO_TIER),
    "no tier is left": lambda damage: damage.change_flags(SCOPE, block(30), 0),
    "a block is added in no tier": lambda damage: damage.add(SCOPE, NEVER, flags=0),
    "a tier becomes another": lambda damage: damage.change_flags(SCOPE, block(30), Tier.LOCAL_SSD.flag),
}


@pytest.mark.parametrize("what", DAMAGES)
async def test_damage_is_found_and_repaired_by_a_snapshot(
    index: ResidencyIndex, sources: dict[str, MessageSource], what: str
) -> None:
    other = MessageSource("z")
    await apply_messages(
        index, other.begin(1), other.store(Scope("other", "other"), block(0))
    )  # so that the scope is known
    await DAMAGES[what](Damage(index, "b"))
    found = await whole_round(index)
    assert (found.checked, found.damaged, found.given_up) == (4, ["b"], 0)
    record = await index.record("b")
    assert record is not None and record.bad and record.answering
    await apply_messages(index, sources["b"].begin(2))
    for shard in range(index.shards):
        for _ in range(3):
            left = await index.sweep(shard, 1 << 30)
        assert left == 0
    assert await contents(index, "b") == sources["b"].held
    assert await contents(index, "a") == sources["a"].held
    assert await whole_round(index) == ScrubResult(4, [], 0, 0, True)


async def test_pinned_blocks_are_no_damage_and_not_in_the_digest(index: ResidencyIndex) -> None:
    use = ScopeUse(SCOPE, 4)
    await index.put(use, "w", Tier.HBM, CHAIN[:160], pinned=True)
    assert await whole_round(index) == ScrubResult(1, [], 0, 0, True)
    digest = await index.digest("w")
    assert digest is not None and len(digest) == WORDS and await index.length() == 20
    await Damage(index, "w").change_flags(SCOPE, block(3), Tier.HBM.flag | NO_TIER)
    assert (await whole_round(index)).damaged == ["w"]


async def test_malformed_holders_values_are_found(index: ResidencyIndex, sources: dict[str, MessageSource]) -> None:
    if not isinstance(index, RedisIndex):
        return
    damage = Damage(index, "b")
    number, (first, second) = await damage.number(), (block(50), block(51))
    for key, value in ((first, number + b"\x01" + number + b"\x01"), (second, b"")):
        await index._store.client.hset(damage.keys.blocks(SCOPE.scope_id), key, value)
    found = await whole_round(index)
    together = damage.shard == Damage(index, "a").shard  # the blocks were also its own, if it is in the same shard
    assert found.damaged == (["a", "b"] if together else ["b"])
    assert not await index._store.client.hexists(damage.keys.blocks(SCOPE.scope_id), second)


async def test_entries_of_unknown_holders_are_taken_out(
    index: ResidencyIndex, sources: dict[str, MessageSource]
) -> None:
    damage = Damage(index, "a")
    await damage.add(SCOPE, block(3), number=b"\x7f\x00\x01")
    await damage.add(SCOPE, NEVER, number=b"\x7f\x00\x01")
    assert await whole_round(index) == ScrubResult(3, [], 2, 0, True)
    assert await damage.value(SCOPE, NEVER) == b""
    assert await whole_round(index) == ScrubResult(3, [], 0, 0, True)
    assert await contents(index, "a") == sources["a"].held


async def test_a_scrub_continues_from_its_position(index: ResidencyIndex, sources: dict[str, MessageSource]) -> None:
    await Damage(index, "a").take(SCOPE, block(BLOCKS - 1))
    parts = []
    for shard in range(index.shards):
        parts.append(await index.scrub(shard, CALL_COST))
        while not parts[-1].ended:
            parts.append(await index.scrub(shard, CALL_COST))
    assert [worker_id for part in parts for worker_id in part.damaged] == ["a"]
    assert sum(part.checked for part in parts) == 3
    if isinstance(index, RedisIndex):
        assert len(parts) > 3


@pytest.mark.parametrize("damaged", [False, True])
async def test_a_worker_that_always_changes_is_counted_too(
    index: ResidencyIndex, sources: dict[str, MessageSource], damaged: bool
) -> None:
    """It stores and removes between any two parts of the scrub."""
    source, damage = sources["a"], Damage(index, "a")
    if damaged:
        await damage.take(SCOPE, block(900))
    parts: list[ScrubResult] = []
    while not (parts and parts[-1].ended):
        at = 10 + len(parts)
        await apply_messages(
            index,
            source.store(OTHER, CHAIN[8 * at : 8 * at + 8]),
            source.remove(SCOPE, block(BLOCKS - at)),
            source.store(SCOPE, CHAIN[8 * at + 80 : 8 * at + 88], Tier.CPU_DRAM),
        )
        parts.append(await index.scrub(damage.shard, CALL_COST))
    assert [worker for part in parts for worker in part.damaged] == (["a"] if damaged else [])
    assert sum(part.given_up for part in parts) == 0
    if isinstance(index, RedisIndex):
        assert len(parts) > 3


async def test_messages_applied_by_another_process_are_no_damage(
    index: ResidencyIndex, sources: dict[str, MessageSource]
) -> None:
    """They are not noted here, so the worker can't be followed, but it can be counted in one go."""
    if not isinstance(index, RedisIndex):
        return
    elsewhere = await open_redis_index(index._store, shards=index.shards, side_index=True, writer=True)
    source, shard = sources["a"], Damage(index, "a").shard
    parts: list[ScrubResult] = []
    while not (parts and parts[-1].ended):
        await apply_messages(elsewhere, source.remove(SCOPE, block(BLOCKS - 1 - len(parts))))
        parts.append(await index.scrub(shard, CALL_COST))
    assert [worker for part in parts for worker in part.damaged] == []
    assert sum(part.given_up + part.checked for part in parts) >= 1


async def test_a_scope_whose_text_was_lost_is_registered_again(
    index: ResidencyIndex, sources: dict[str, MessageSource]
) -> None:
    """As after a failover of the registry's slot alone: no message names the scope, and the process that wrote it is gone."""
    if not isinstance(index, RedisIndex):
        return
    await index._store.client.hdel(SCOPES, OTHER.scope_id)
    elsewhere = await open_redis_index(index._store, shards=index.shards, side_index=True, writer=True)
    assert sorted((await whole_round(elsewhere)).damaged) == ["a", "b", "c"]
    for source in sources.values():
        await apply_messages(elsewhere, source.begin(2))
    assert await contents(elsewhere, "a") == sources["a"].held
    assert (await whole_round(elsewhere)).damaged == []


async def test_a_scrub_finds_damage_although_no_scope_is_registered(index: ResidencyIndex) -> None:
    """All blocks are gone as well."""
    source = MessageSource("w")
    await apply_messages(index, source.begin(1), source.store(SCOPE, block(0)))
    await Damage(index, "w").take(SCOPE, block(0))
    if isinstance(index, RedisIndex):
        await index._store.client.delete(SCOPES)
    assert (await whole_round(index)).damaged == ["w"]


@pytest.mark.parametrize("index", ["valkey"], indirect=True)
async def test_a_false_block_of_a_number_that_is_used_again_is_found_and_repaired(index: RedisIndex) -> None:
    """The number's former holder never used the scope, so its sweep did not look there."""
    former, next_one = MessageSource("w"), MessageSource("x")
    other = MessageSource("y")
    await apply_messages(index, former.begin(1), former.store(SCOPE, CHAIN[:80]))
    await apply_messages(index, other.begin(1), other.store(OTHER, CHAIN[:80]))
    damage = Damage(index, "w")
    number = await damage.number()
    await damage.add(OTHER, block(0))
    await apply_messages(index, former.begin(2))
    assert await index.sweep(0, 1 << 30) == 0
    reusing = await open_redis_index(index._store, side_index=True, writer=True, reuse_ms=0)
    await apply_messages(reusing, next_one.begin(1), next_one.store(SCOPE, CHAIN[:80]))
    assert await Damage(index, "x").number() == number
    assert (await index.overlap(OTHER, CHAIN[:80])).depths() == {"x": 1, "y": 10}
    assert (await whole_round(index)).damaged == ["x"]
    await apply_messages(index, next_one.begin(2))
    assert await index.sweep(0, 1 << 30) == 0
    assert (await index.overlap(OTHER, CHAIN[:80])).depths() == {"y": 10}
    assert await contents(index, "x") == next_one.held


async def test_a_scrub_may_be_limited_to_partitions(index: ResidencyIndex, sources: dict[str, MessageSource]) -> None:
    await Damage(index, "a").take(SCOPE, block(5))
    mine = partition_of("a", index.partitions)
    shard = shard_of(mine, index.shards)
    others = set(range(index.partitions)) - {mine}
    assert (await index.scrub(shard, 1 << 30, others)).damaged == []
    assert (await index.scrub(shard, 1 << 30, {mine})) == ScrubResult(1, ["a"], 0, 0, True)


@pytest.mark.parametrize("index", ["valkey", "valkey-4", "redis8-4", "cluster-4"], indirect=True)
async def test_a_recount_counts_blocks_by_scope(index: RedisIndex, sources: dict[str, MessageSource]) -> None:
    await Damage(index, "b").take(SCOPE, block(7))
    await Damage(index, "c").change_flags(SCOPE, block(30), Tier.HBM.flag | NO_TIER)
    assert [one.sound for one in await index.recount(["a", "b", "c"])] == [True, True, False]
    found = {one.worker_id: one for one in await index.recount(["a", "b", "nobody"])}
    assert sorted(found) == ["a", "b"]
    assert (found["a"].incarnation, found["a"].seq, found["a"].moved) == (1, 3, False)
    digests = {scope: Digest() for scope in (SCOPE, OTHER)}
    for (scope, key), tiers in sources["a"].held.items():
        for tier in tiers:
            digests[scope].add(scope.scope_id, tier, key)
    assert found["a"].scopes == {scope: digest.words for scope, digest in digests.items()}
    assert [Digest(list(words)).blocks for words in found["b"].scopes.values()] in ([58, 10], [10, 58])
