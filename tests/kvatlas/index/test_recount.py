"""A recount finds damage that no message did; a snapshot and a sweep repair it."""

import pytest

from kvatlas.blocks.digest import WORDS, Digest
from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.identity import Scope
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import RedisIndex
from tests.kvatlas.index.damage import Damage, damaged
from tests.kvatlas.index.message_source import MessageSource, apply_messages, contents

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("index", ["valkey", "valkey-4", "redis8-4", "cluster-4"], indirect=True),
]

SCOPE, OTHER = Scope("model", "tokenizer"), Scope("model", "tokenizer", "adapter")
BLOCKS = 1_400
NO_TIER = 1 << 6
"""A bit of an entry that no tier has."""
CHAIN = extend_chain(range(4 * BLOCKS), 4)
NEVER = extend_chain(range(900_000, 900_004), 4)


def block(number: int) -> bytes:
    return CHAIN[8 * number : 8 * number + 8]


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
    assert await damaged(index, *sources) == []


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
    assert await damaged(index, *sources, "z") == ["b"]
    await apply_messages(index, sources["b"].begin(2))
    for shard in range(index.shards):
        for _ in range(3):
            left = await index.sweep(shard, 1 << 30)
        assert left == 0
    assert await contents(index, "b") == sources["b"].held
    assert await contents(index, "a") == sources["a"].held
    assert await damaged(index, *sources, "z") == []


async def test_pinned_blocks_are_no_damage_and_not_in_the_digest(index: ResidencyIndex) -> None:
    use = ScopeUse(SCOPE, 4)
    await index.put(use, "w", Tier.HBM, CHAIN[:160], pinned=True)
    assert await damaged(index, "w") == []
    digest = await index.digest("w")
    assert digest is not None and len(digest) == WORDS and await index.length() == 20
    await Damage(index, "w").change_flags(SCOPE, block(3), Tier.HBM.flag | NO_TIER)
    assert await damaged(index, "w") == ["w"]


async def test_malformed_holders_values_are_found(index: ResidencyIndex, sources: dict[str, MessageSource]) -> None:
    assert isinstance(index, RedisIndex)
    damage = Damage(index, "b")
    number, (first, second) = await damage.number(), (block(50), block(51))
    for key, value in ((first, number + b"\x01" + number + b"\x01"), (second, b"")):
        await index._store.client.hset(damage.keys.blocks(SCOPE.scope_id), key, value)
    found = await damaged(index, *sources)
    together = damage.shard == Damage(index, "a").shard  # whose blocks these also were, if it is in the same shard
    assert found == (["a", "b"] if together else ["b"])


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
