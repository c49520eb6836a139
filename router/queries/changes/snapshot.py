"""The blocks that workers hold now in the scopes that a caller may see, as changes of at most a few hundred blocks."""

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence

from kvatlas.blocks.external_chain import hash_text
from kvatlas.blocks.tiers import Tier, tiers_of
from kvatlas.identity import Scope
from kvatlas.index.holder_entries import entries_of
from kvatlas.index.redis.records import unpack_incarnation
from kvatlas.index.redis.shard_reader import ShardReader
from kvatlas_router.queries.changes.change import Change, ChangeReader, scope_fields


async def read_snapshot(
    readers: Sequence[ShardReader], scopes: Mapping[bytes, Scope], reader: ChangeReader
) -> AsyncIterator[Change]:
    """Read a snapshot. The snapshot does not show a single moment: apply the stream's messages after a position taken before
    it (`store_copy`). Records the workers in `reader`. Raises Unreachable."""
    for shard in readers:
        places: dict[bytes, tuple[str, int, bool]] = {}
        for worker_id, record in (await shard.records()).items():
            if not reader.view.sees(worker_id):
                continue
            incarnation = unpack_incarnation(record.incarnation)
            for holder, aside in ((record.active, False), (record.loading, True)):
                if holder:
                    places[holder] = worker_id, incarnation, aside
            reader.know(worker_id, incarnation, aside=bool(record.loading))
            if record.loading:
                yield Change("snapshot", {"worker": worker_id, "incarnation": incarnation, "aside": True, "hashes": []})
        for scope_id, scope in scopes.items():
            sizes: dict[bytes, tuple[int, int]] = {}
            async for blocks in shard.scan(shard.keys.blocks(scope_id)):
                for (holder, tier), hashes in _by_holder(blocks, places).items():
                    if holder not in sizes:
                        sizes[holder] = (await shard.touched(holder)).get(scope_id, (0, 0))
                    worker_id, incarnation, aside = places[holder]
                    reader.show(worker_id)
                    yield Change(
                        "snapshot",
                        {
                            "worker": worker_id,
                            "incarnation": incarnation,
                            "aside": aside,
                            **scope_fields(scope, *sizes[holder]),
                            "tier": tier.label,
                            "hashes": hashes,
                        },
                    )


def _by_holder(blocks: Mapping[bytes, bytes], places: Mapping[bytes, object]) -> dict[tuple[bytes, Tier], list[str]]:
    found: dict[tuple[bytes, Tier], list[str]] = defaultdict(list)
    for key, value in blocks.items():
        text = hash_text(int.from_bytes(key, "little"))
        for holder, flags in entries_of(value):
            if holder in places:
                for tier in tiers_of(flags):
                    found[holder, tier].append(text)
    return found
