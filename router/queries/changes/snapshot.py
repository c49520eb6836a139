"""The blocks that workers hold now in the scopes that a caller may see, as changes of at most a few hundred blocks."""

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.blocks.external_chain import hash_text
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier, tiers_of
from kvatlas.identity import Scope
from kvatlas.index.holder_entries import NUMBER_BYTES, entries_of
from kvatlas.index.redis.records import unpack_incarnation
from kvatlas.index.redis.shard_reader import ShardReader
from kvatlas_router.queries.changes.change import Change, ChangeReader, scope_fields


async def read_snapshot(
    readers: Sequence[ShardReader], scopes: Mapping[bytes, Scope], reader: ChangeReader
) -> AsyncIterator[Change]:
    """Read a snapshot. The snapshot does not show a single moment, so apply the stream's messages after a position taken
    before it (`store_copy`). Records the workers in `reader`. Raises Unreachable."""
    for shard in readers:
        places: dict[bytes, tuple[str, int, bool]] = {}
        dropped = await shard.dropped()
        for worker_id, record in (await shard.records()).items():
            if not reader.view.sees(worker_id):
                continue
            incarnation = unpack_incarnation(record.incarnation)
            for holder, aside in ((record.active, False), (record.loading, True)):
                if holder:
                    places[holder] = worker_id, incarnation, aside
            now = dropped.get(record.loading or record.active)
            reader.know(worker_id, incarnation, aside=bool(record.loading), dropped=now)
            if record.loading:
                begun = {"worker": worker_id, "incarnation": incarnation, "aside": True, "dropped": now, "hashes": []}
                yield Change("snapshot", begun)
        for scope_id, scope in scopes.items():
            sizes: dict[bytes, BlockSizes] = {}
            async for blocks in shard.scan(shard.keys.blocks(scope_id)):
                for (holder, tier), hashes in _by_holder(blocks, places).items():
                    if holder not in sizes:
                        sizes[holder] = (await shard.touched(holder)).get(scope_id, BlockSizes())
                    worker_id, incarnation, aside = places[holder]
                    reader.show(worker_id)
                    yield Change(
                        "snapshot",
                        {
                            "worker": worker_id,
                            "incarnation": incarnation,
                            "aside": aside,
                            "dropped": dropped.get(holder),
                            **scope_fields(scope, sizes[holder], tier),
                            "tier": tier.label,
                            "hashes": hashes,
                        },
                    )
            async for marks in shard.scan(shard.keys.marks(scope_id)) if dropped else _nothing():
                for holder, hashes in _marked_by(marks, places).items():
                    worker_id, incarnation, aside = places[holder]
                    found = {"worker": worker_id, "incarnation": incarnation, "aside": aside}
                    fields = scope_fields(scope, sizes.get(holder, BlockSizes()), Tier.HBM)
                    yield Change("snapshot", {**found, "dropped": dropped.get(holder), **fields, "marked": hashes})


async def _nothing() -> AsyncIterator[dict[bytes, bytes]]:
    return
    yield {}


def _marked_by(marks: Mapping[bytes, bytes], places: Mapping[bytes, object]) -> dict[bytes, list[str]]:
    """The marked blocks of each holder. Heads are in the same table, but only help to look marks up."""
    found: dict[bytes, list[str]] = defaultdict(list)
    for key, value in marks.items():
        if len(key) == HASH_BYTES:
            for at in range(0, len(value), NUMBER_BYTES):
                if (holder := value[at : at + NUMBER_BYTES]) in places:
                    found[holder].append(hash_text(int.from_bytes(key, "little")))
    return found


def _by_holder(blocks: Mapping[bytes, bytes], places: Mapping[bytes, object]) -> dict[tuple[bytes, Tier], list[str]]:
    found: dict[tuple[bytes, Tier], list[str]] = defaultdict(list)
    for key, value in blocks.items():
        text = hash_text(int.from_bytes(key, "little"))
        for holder, flags in entries_of(value):
            if holder in places:
                for tier in tiers_of(flags):
                    found[holder, tier].append(text)
    return found
