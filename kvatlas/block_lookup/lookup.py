"""Finds out who holds a block, or the blocks that follow it, and removes a block. The block may be given by any of its names.

Sequence hashes, and keys that contain one, are looked up in the index. Only publishers know their engines' own hashes, so the
publishers of the scope's workers are asked what such a name stands for. To remove a block, the worker's publisher is asked to
send the same messages as if the engine had removed it, and the index follows them; if the worker has no publisher, a direct
write removes the block.
"""

from collections.abc import Sequence

from nats.aio.client import Client

from kvatlas.blocks.block_names import BlockName, NameInEngine, sequence_hash_of
from kvatlas.blocks.external_chain import is_hash_text
from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.residency import BlockKey, Residency, residency_order
from kvatlas.bus.control import ControlOp, ControlRequest, NamedBlock, ScopeFields
from kvatlas.bus.control_requests import ask_publishers
from kvatlas.errors import InvalidValue, NotSupported, Unreachable
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import OWN_CHAIN, Scope
from kvatlas.index.protocol import ResidencyIndex


class BlockLookup:
    """Looks up blocks in one index. Calls raise Unreachable, or InvalidValue for a name that no block can have."""

    def __init__(self, index: ResidencyIndex, fleet: FleetStore, client: Client | None) -> None:
        """`client`: a NATS client for asking publishers; None: lookups by an engine's own hash raise NotSupported."""
        self._index = index
        self._fleet = fleet
        self._client = client

    async def locate(self, scope: Scope, name: BlockName) -> Sequence[Residency]:
        """Every residency of the block, by worker and tier; if the name is an engine's hash, of all blocks that it stands
        for."""
        found: list[Residency] = []
        for value in await self.sequence_hashes(scope, name):
            found += await self._index.locate(scope, value)
        return sorted(found, key=residency_order)

    async def children(self, scope: Scope, name: BlockName | None) -> Sequence[Residency]:
        """Every residency of the blocks that follow this one (None: of first blocks). Raises NotSupported if there is no side
        index."""
        if name is None:
            return await self._index.children(scope, None)
        found: list[Residency] = []
        for value in await self.sequence_hashes(scope, name):
            found += await self._index.children(scope, value)
        return sorted(found, key=residency_order)

    async def remove(self, scope: Scope, worker_id: str, name: BlockName) -> int:
        """Remove the block from a worker, in all tiers. Returns the number of residencies that the index listed."""
        values = await self.sequence_hashes(scope, name)
        held = [one for value in values for one in await self._index.locate(scope, value) if one.worker_id == worker_id]
        if not held:
            return 0
        spoken_for = worker_id in await self._fleet.all()
        for value in dict.fromkeys(one.sequence_hash for one in held):
            if spoken_for:
                await self._drop(worker_id, NamedBlock(**ScopeFields.fields_of(scope), sequence_hash=value))
            else:
                await self._index.remove(scope, worker_id, None, value.to_bytes(HASH_BYTES, "little"))
        return len(held)

    async def sequence_hashes(self, scope: Scope, name: BlockName) -> Sequence[int]:
        if isinstance(name, int):
            return [name]
        if isinstance(name, NameInEngine):
            return sorted({one.sequence_hash for one in await self._blocks(scope, name.text)})
        value = sequence_hash_of(name)
        if value is not None:
            return [value] if await self._follows(scope, value, name) else []
        parents = {one.sequence_hash for one in await self._blocks(scope, name.prefix_hash)}
        return sorted(
            {one.sequence_hash for one in await self._blocks(scope, name.block_hash) if one.parent in parents}
        )

    async def _follows(self, scope: Scope, value: int, key: BlockKey) -> bool:
        """True if the block follows the one that the key names. A sequence hash implies that; with a side index, a key that
        contradicts it is noticed."""
        if scope.chain != OWN_CHAIN:
            return True
        parent = int(key.prefix_hash, 16) if is_hash_text(key.prefix_hash) else None
        try:
            followers = await self._index.children(scope, parent)
        except NotSupported:
            return True
        return any(one.sequence_hash == value for one in followers)

    async def _blocks(self, scope: Scope, engine_hash: str) -> list[NamedBlock]:
        """The blocks in this scope that an engine's hash stands for, according to the publishers."""
        if self._client is None:
            raise NotSupported("only publishers know an engine's own hashes, and there is no connection to NATS")
        records = await self._fleet.all()
        workers = [id for id, one in records.items() if one.endpoint.pool_id == scope.pool_id]
        replies = await ask_publishers(
            self._client, workers, ControlRequest(op=ControlOp.BLOCKS, engine_hash=engine_hash)
        )
        if workers and not replies:
            raise Unreachable(
                f"none of {len(workers)} publishers of {scope.model_id} says what engine hash {engine_hash:.80} is"
            )
        return [block for reply in replies.values() for block in reply.blocks or () if block.scope == scope]

    async def _drop(self, worker_id: str, block: NamedBlock) -> None:
        if self._client is None:
            raise NotSupported(
                f"worker {worker_id}: only its publisher can take blocks out, and there is no connection to NATS"
            )
        replies = await ask_publishers(self._client, [worker_id], ControlRequest(op=ControlOp.DROP, block=block))
        reply = replies.get(worker_id)
        if reply is None:
            raise Unreachable(f"worker {worker_id}: its publisher does not answer; nothing was removed")
        if not reply.ok:
            raise InvalidValue(f"worker {worker_id}: its publisher refused ({reply.note}); nothing was removed")
