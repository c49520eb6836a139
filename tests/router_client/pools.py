"""Pools of workers and the index they fill, for tests."""

from collections.abc import Mapping, Sequence
from typing import Any

from kvatlas.blocks.hashing import HASH_BYTES, extend_chain, thin
from kvatlas.blocks.residency import Overlap
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.fleet.records import (
    EngineEndpoint,
    EngineKind,
    EngineState,
    FleetRecord,
    KvConnector,
    Liveness,
    WorkerState,
)
from kvatlas.identity import Scope
from kvatlas.index.protocol import ResidencyIndex

SCOPE = Scope("model", "tokenizer")
BLOCK_BYTES = 1 << 20
PEER: Mapping[str, Any] = {
    "kv_connector": KvConnector.P2P,
    "kv_port": 5710,
    "kv_tiers": tuple(tier.label for tier in Tier),
    "base_url": "http://10.0.0.1:8000",
}
"""A worker from which others can fetch everything that it holds, and that can fetch from them."""
FETCH_BY = frozenset({KvConnector.P2P})


def worker(
    id: str,
    *,
    state: EngineState = EngineState.UP,
    liveness: Liveness = Liveness.ALIVE,
    load: Mapping[str, Any] | None = None,
    scope: Scope = SCOPE,
    **endpoint: Any,
) -> FleetRecord:
    """A routable worker of the scope's pool with blocks of 16 tokens; its load is unknown unless given."""
    fields: dict[str, Any] = {
        "kind": EngineKind.VLLM,
        "model_id": scope.model_id,
        "tokenizer_id": scope.tokenizer_id,
        "block_size": 16,
        "block_bytes": BLOCK_BYTES,
        **endpoint,
    }
    return FleetRecord(
        endpoint=EngineEndpoint(id=id, **fields),
        state=state,
        liveness=liveness,
        load=None if load is None else WorkerState(id=id, **load),
    )


def pool(*records: FleetRecord) -> dict[str, FleetRecord]:
    return {record.endpoint.id: record for record in records}


async def hold(
    index: ResidencyIndex,
    record: FleetRecord,
    tokens: Sequence[int],
    *,
    blocks: int | None = None,
    tier: Tier = Tier.HBM,
    scope: Scope = SCOPE,
) -> None:
    """Make a worker hold the start of a prompt (`blocks` absent: all full blocks), announced at its granularity."""
    size, step = record.endpoint.block_size, record.endpoint.granularity
    assert size is not None
    chain = extend_chain(tokens, size)[: None if blocks is None else blocks * HASH_BYTES]
    announced = thin(chain, step)
    if announced:
        await index.put(ScopeUse(scope, size, record.endpoint.block_bytes), record.endpoint.id, tier, announced)


class CountingIndex:
    """An index that counts its queries."""

    def __init__(self, index: ResidencyIndex) -> None:
        self._index = index
        self.questions: list[int] = []

    async def overlap(
        self, scope: Scope, hashes: bytes, *, first_index: int = 0, limit: int | None = None, verify: bool = False
    ) -> Overlap:
        self.questions.append(len(hashes) // HASH_BYTES)
        return await self._index.overlap(scope, hashes, first_index=first_index, limit=limit, verify=verify)


class CountingFleet:
    """A fleet that counts how often it is read."""

    def __init__(self, records: Mapping[str, FleetRecord]) -> None:
        self.records = records
        self.readings = 0

    async def pool(self, pool_id: str) -> Mapping[str, FleetRecord]:
        self.readings += 1
        return {id: record for id, record in self.records.items() if record.endpoint.pool_id == pool_id}

    async def all(self) -> Mapping[str, FleetRecord]:
        self.readings += 1
        return self.records
