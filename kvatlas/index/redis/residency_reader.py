"""The residencies of one shard's active holders, taken from blocks that have already been read."""

from collections.abc import AsyncIterator, Sequence
from typing import Self

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.blocks.residency import Residency
from kvatlas.blocks.tiers import tiers_of
from kvatlas.identity import Scope
from kvatlas.index.holder_entries import entries_of
from kvatlas.index.mark_lookup import has_mark
from kvatlas.index.redis.pins import Pins
from kvatlas.index.redis.scope_registry import ScopeRegistry
from kvatlas.index.redis.shard_reader import ShardReader


class ResidencyReader:
    """The active holders are those at the time when this was opened. Raises Unreachable."""

    def __init__(
        self, reader: ShardReader, pins: Pins, active: dict[bytes, str], marked: set[bytes], pinned: set[bytes]
    ) -> None:
        self._reader = reader
        self._pins = pins
        self._active = active
        self._marked = marked
        self._pinned = pinned
        self._touched: dict[bytes, dict[bytes, BlockSizes]] = {}

    @classmethod
    async def open(cls, reader: ShardReader, pins: Pins, worker_id: str | None = None) -> Self:
        """Open a reader for one worker's holder, or for all holders."""
        active = {holder: name for holder, name in (await reader.active()).items() if worker_id in (None, name)}
        marked = active.keys() & (await reader.dropped()).keys()
        return cls(reader, pins, active, marked, await pins.holders())

    async def snapshot(self, registry: ScopeRegistry) -> AsyncIterator[Residency]:
        """All residencies. Not atomic."""
        for holder in self._active:
            await self._touched_by(holder)
        for scope_id in sorted({scope_id for scopes in self._touched.values() for scope_id in scopes}):
            if await self._reader.has_blocks(scope_id):  # otherwise the scope may be forgotten
                scope = await registry.scope(scope_id)
                async for blocks in self._reader.block_batches(scope_id):
                    for residency in await self.of_blocks(scope, blocks):
                        yield residency

    async def of_blocks(self, scope: Scope, blocks: Sequence[tuple[bytes, bytes]]) -> list[Residency]:
        """The residencies in these (hash, holders value) pairs of a scope's blocks, in the same order."""
        marks = await self._reader.marks(scope.scope_id, b"".join(key for key, _ in blocks)) if self._marked else {}
        found: list[tuple[bytes, Residency]] = []
        for key, value in blocks:
            for holder, flags in entries_of(value):
                if holder in self._active:
                    resumable = has_mark(marks.get(key), holder) if holder in self._marked else None
                    sizes = (await self._touched_by(holder)).get(scope.scope_id, BlockSizes())
                    number, name = int.from_bytes(key, "little"), self._active[holder]
                    held = residencies_of(scope, number, name, flags, sizes, resumable)
                    found += ((holder, one) for one in held)
        return await self._pins.mark(found, self._pinned)

    async def _touched_by(self, holder: bytes) -> dict[bytes, BlockSizes]:
        if holder not in self._touched:
            self._touched[holder] = await self._reader.touched(holder)
        return self._touched[holder]


def residencies_of(
    scope: Scope, sequence_hash: int, worker_id: str, flags: int, sizes: BlockSizes, resumable: bool | None
) -> list[Residency]:
    """One residency for each tier in the flags of an entry."""
    return [
        Residency(scope, sequence_hash, worker_id, tier, sizes.bytes_in(tier), resumable=resumable)
        for tier in tiers_of(flags)
    ]
