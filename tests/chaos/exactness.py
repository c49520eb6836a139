"""Checks that the index holds what the publishers announce, and that they announce only what their engines hold."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import anyio
import httpx
from nats.aio.client import Client
from nats.errors import Error as NatsError

from kvatlas.blocks.digest import WORDS, Digest
from kvatlas.blocks.external_chain import hash_text
from kvatlas.blocks.tiers import parse_tier
from kvatlas.bus.control import ControlOp, ControlReply, ControlRequest
from kvatlas.bus.subjects import control_subject
from kvatlas.errors import KvatlasError
from kvatlas.fleet.records import EngineState, Liveness
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from tests.http_client import http_client

COMPARE_EVERY_S = 0.1

Residence = tuple[str | None, str, str]
"""Adapter, tier (or MARKED) and sequence hash of one worker's block."""

MARKED = "marked"
"""Used in place of a tier: a prompt can be resumed after this block of a hybrid."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """`problem` says why the index is not exact; empty if it is. `wrong` and `missing`: see `Outcome`."""

    problem: str
    exported: int = 0
    wrong: int = 0
    missing: int = 0


class Checker:
    """Connects without proxies. `engines`: base URL by worker id."""

    def __init__(self, model: str, engines: Mapping[str, str], nats: Client, store: Store) -> None:
        self._model = model
        self._engines = engines
        self.nats = nats
        self.store = store
        self.told: dict[str, set[Residence]] = {}
        """Blocks of other holders, by worker id; set by a scenario that runs their publishers."""

    async def status(self, worker_id: str) -> ControlReply:
        """Raises NatsError if the publisher does not answer."""
        return await self._ask(worker_id, ControlOp.STATUS)

    async def compare_digests(self) -> str:
        """The differences that the digests alone show; empty if they agree. Cheap enough to be polled (the proxies run in this
        process)."""
        try:
            index = await open_redis_index(self.store, writer=False)
            for worker_id in self._holders:
                reply = await self._ask(worker_id, ControlOp.DIGEST)
                words = reply.digest or []
                if [*words, *reply.marks] != list(await index.digest(worker_id) or []):
                    return f"{worker_id} announces {sum(words[::3])} blocks, the index has another digest"
        except (NatsError, KvatlasError, TimeoutError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    async def compare_index(self, under_reporting: Iterable[str] = ()) -> Comparison:
        """Compare the index's current blocks. `under_reporting`: workers whose publishers can't know everything that their
        engine holds."""
        await anyio.sleep(COMPARE_EVERY_S)  # paced: a comparison takes time in this process, where the proxies run
        try:
            exported = await self._exported()
            return await self.compare(exported, under_reporting)
        except (NatsError, KvatlasError, httpx.HTTPError, TimeoutError) as error:
            return Comparison(f"{type(error).__name__}: {error}")

    async def compare(self, exported: Mapping[str, set[Residence]], under_reporting: Iterable[str] = ()) -> Comparison:
        """Compare the exported blocks of each worker with the publishers' digests and the engines' caches."""
        partial = set(under_reporting)
        problems: list[str] = []
        wrong = missing = 0
        records = await FleetStore(self.store).all()
        if strange := set(exported) - set(self._holders):
            problems.append(f"blocks of unknown workers exported {sorted(strange)}")
            wrong += sum(len(exported[worker_id]) for worker_id in strange)
        for worker_id in self._holders:
            mine = exported.get(worker_id, set())
            told = self.told.get(worker_id)
            held = await self._held(worker_id) if told is None else told
            announced = await self._ask(worker_id, ControlOp.DIGEST)
            wrong += len(mine - held)
            missing += len(held - mine)
            digest = self._digest(mine)
            if announced.digest != digest.words:
                blocks = sum((announced.digest or [0])[::3])
                problems.append(f"{worker_id} announces {blocks} blocks, {digest.blocks} exported")
            if mine - held:
                problems.append(
                    f"{worker_id}: {len(mine - held)} exported blocks or marks that its engine does not have"
                )
            if held - mine and worker_id not in partial:
                problems.append(f"{worker_id}: {len(held - mine)} blocks or marks of its engine not exported")
            record = records.get(worker_id)
            if record is None or record.liveness is not Liveness.ALIVE or record.state is not EngineState.UP:
                problems.append(f"{worker_id} is no candidate for routers")
        return Comparison("; ".join(problems), sum(map(len, exported.values())), wrong, missing)

    async def resident_blocks(self, worker_id: str) -> int:
        """Number of blocks that the index has for this worker now; 0 without an active holder."""
        index = await open_redis_index(self.store, writer=False)
        return sum((await index.digest(worker_id) or [0])[:WORDS:3])

    @property
    def _holders(self) -> list[str]:
        return [*self._engines, *self.told]

    async def _exported(self) -> dict[str, set[Residence]]:
        index = await open_redis_index(self.store, writer=False)
        found: dict[str, set[Residence]] = {}
        async for residency in index.snapshot():
            mine = found.setdefault(residency.worker_id, set())
            mine |= _residences(
                residency.scope.adapter_id,
                residency.tier.label,
                hash_text(residency.sequence_hash),
                residency.resumable,
            )
        return found

    async def _held(self, worker_id: str) -> set[Residence]:
        async with http_client(timeout=2) as client:
            answer = (await client.get(f"{self._engines[worker_id]}/kv_blocks")).json()
        held: set[Residence] = set()
        for block in answer["blocks"]:
            held |= _residences(block["adapter_id"], block["tier"], block["sequence_hash"], block.get("resumable"))
        return held

    async def _ask(self, worker_id: str, op: ControlOp) -> ControlReply:
        reply = await self.nats.request(control_subject(worker_id), ControlRequest(op=op).pack(), timeout=2)
        return ControlReply.unpack(reply.data)

    def _digest(self, residences: Iterable[Residence]) -> Digest:
        digest = Digest()
        for adapter, tier, sequence_hash in residences:
            if tier == MARKED:
                continue
            scope = Scope(self._model, self._model, adapter)
            digest.add(scope.scope_id, parse_tier(tier), int(sequence_hash, 16).to_bytes(8, "little"))
        return digest


def residences_of_export(lines: Iterable[str]) -> dict[str, set[Residence]]:
    """The output of `kvatlas export` by worker."""
    found: dict[str, set[Residence]] = {}
    for line in map(json.loads, lines):
        mine = found.setdefault(line["worker"], set())
        mine |= _residences(line["adapter_id"], line["tier"], line["sequence_hash"], line["resumable"])
    return found


def _residences(adapter: str | None, tier: str, sequence_hash: str, resumable: bool | None) -> set[Residence]:
    return {(adapter, tier, sequence_hash)} | ({(adapter, MARKED, sequence_hash)} if resumable else set())
