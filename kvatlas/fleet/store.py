"""Fleet state in the store: worker records by pool, replicas of the indexer, and their leases.

    kva:{fleet}:members   HASH  member id -> expiry (ms of the store's clock)
    kva:{fleet}:leases    HASH  partition -> "<expiry ms> <member id>"
    kva:{fleet}:pools     SET   pool ids
    kva:{pool:<id>}:workers   HASH  worker id -> FleetRecord; the pool's other keys: `kvatlas/reservations/functions/_pool.lua`

Leases only save work; nothing that must be right depends on them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from redis.exceptions import ResponseError

from kvatlas.errors import InvalidValue, Unreachable
from kvatlas.fleet.records import FleetRecord
from kvatlas.reservations.protocol import WorkerReport
from kvatlas.reservations.redis import write_reports
from kvatlas.reservations.redis_calls import pool_call, pool_keys, pool_library
from kvatlas.store.connection import UNREACHABLE, Store, reason
from kvatlas.store.function_library import function_library

MEMBERS = "kva:{fleet}:members"
LEASES = "kva:{fleet}:leases"
POOLS = "kva:{fleet}:pools"

LIBRARY = "kvatlas_fleet"
FUNCTIONS = Path(__file__).parent / "functions"
SHARED = ("_register", "_clock")


def pool_workers_key(pool_id: str) -> str:
    return pool_keys(pool_id)[0]


def fleet_library() -> str:
    """The code of the fleet's functions."""
    return function_library(LIBRARY, FUNCTIONS, SHARED)


class FleetStore:
    """Raises Unreachable from every call where the store does not answer."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._read: dict[str, dict[bytes, tuple[bytes, FleetRecord]]] = {}
        """By pool, what was read last: records change once a second, are read more often, and cost 30 us to unpack."""

    async def load_functions(self) -> None:
        """This version's functions of the fleet and of pools are the store's afterwards. Raises Unreachable, also where there
        is no room for them."""
        for code in (fleet_library(), pool_library()):
            await self._store.load_functions(code)

    async def write(self, records: Mapping[str, FleetRecord]) -> None:
        """Write workers' records and report their load. The owner of a worker's partition alone does this."""
        by_pool: dict[str, dict[str, tuple[bytes, WorkerReport]]] = {}
        now_us = time.time_ns() // 1_000
        for worker_id, record in records.items():
            told = (record.pack(), WorkerReport.of(record, now_us))
            by_pool.setdefault(record.endpoint.pool_id, {})[worker_id] = told
        for pool_id, reports in by_pool.items():
            await write_reports(self._store, pool_id, reports)
        if by_pool:
            await self._fcall("kvatlas_fleet_pools", [POOLS], list(by_pool))

    async def correct(self, records: Mapping[str, FleetRecord]) -> None:
        """Write workers' records where others are: of one that the pool does not have (any more) none is made."""
        by_pool: dict[str, list[str]] = {}
        for worker_id, record in records.items():
            by_pool.setdefault(record.endpoint.pool_id, []).append(worker_id)
        wrong: dict[str, FleetRecord] = {}
        for pool_id, worker_ids in by_pool.items():
            try:
                found = await self._store.client.hmget(pool_workers_key(pool_id), worker_ids)
            except UNREACHABLE as error:
                raise self._unreachable(error) from error
            there = {
                worker_id: packed for worker_id, packed in zip(worker_ids, found, strict=True) if packed is not None
            }
            wrong.update({w: records[w] for w, packed in there.items() if packed != records[w].pack()})
        await self.write(wrong)

    async def forget(self, worker_id: str, pool_id: str) -> None:
        """Take a worker out of its pool, with all that is booked on it; a pool without workers is forgotten too."""
        await pool_call(self._store, "forget", pool_id, [worker_id])
        if not await self._workers_of(pool_id):
            await self._fcall("kvatlas_fleet_no_pool", [POOLS], [pool_id])
            if await self._workers_of(pool_id):  # another owner wrote a worker of it meanwhile
                await self._fcall("kvatlas_fleet_pools", [POOLS], [pool_id])

    async def pool(self, pool_id: str) -> dict[str, FleetRecord]:
        """The workers of one pool. Raises InvalidValue for a record of an unknown form."""
        found, before = await self._packed(pool_id), self._read.get(pool_id, {})
        now: dict[bytes, tuple[bytes, FleetRecord]] = {}
        for worker_id, packed in found.items():
            known = before.get(worker_id)
            if known is None or known[0] != packed:
                known = packed, FleetRecord.unpack(packed)
            now[worker_id] = known
        self._read[pool_id] = now
        return {worker_id.decode(): record for worker_id, (_, record) in now.items()}

    async def pools(self) -> list[str]:
        """Every pool that has workers."""
        try:
            return sorted(pool_id.decode() for pool_id in await self._store.client.smembers(POOLS))
        except UNREACHABLE as error:
            raise self._unreachable(error) from error

    async def all(self) -> dict[str, FleetRecord]:
        """Every worker of every pool."""
        records: dict[str, FleetRecord] = {}
        for pool_id in await self.pools():
            records.update(await self.pool(pool_id))
        return records

    async def entries(self, which: Callable[[str, str], bool]) -> list[tuple[str, str, FleetRecord | None]]:
        """Worker, pool and record of the entries that `which` (worker, pool) is true of. No record: it can't be understood."""
        entries: list[tuple[str, str, FleetRecord | None]] = []
        for pool_id in await self.pools():
            for name, packed in (await self._packed(pool_id)).items():
                if which(worker_id := name.decode(), pool_id):
                    try:
                        entries.append((worker_id, pool_id, FleetRecord.unpack(packed)))
                    except InvalidValue:
                        entries.append((worker_id, pool_id, None))
        return entries

    async def beat(self, member_id: str, ttl_ms: int) -> list[str]:
        """Say that this replica lives for `ttl_ms` from now; the live members, this one among them, sorted."""
        return sorted(
            member.decode() for member in await self._fcall("kvatlas_fleet_beat", [MEMBERS], [member_id, ttl_ms])
        )

    async def is_member(self, member_id: str) -> bool:
        """Does the store know this replica, alive or expired?"""
        try:
            return bool(await self._store.client.hexists(MEMBERS, member_id))
        except UNREACHABLE as error:
            raise self._unreachable(error) from error

    async def leave(self, member_id: str) -> None:
        """Give up membership and every lease at once."""
        await self._fcall("kvatlas_fleet_leave", [MEMBERS, LEASES], [member_id])

    async def claim(self, member_id: str, ttl_ms: int, partitions: Sequence[int]) -> list[int]:
        """Take or renew the leases among `partitions` that are free, expired or one's own; those held now, ascending."""
        if not partitions:
            return []
        held = await self._fcall("kvatlas_fleet_claim", [LEASES], [member_id, ttl_ms, *partitions])
        return sorted(int(partition) for partition in held)

    async def release(self, member_id: str, partitions: Sequence[int]) -> None:
        """Give up the leases among `partitions` that are one's own."""
        if partitions:
            await self._fcall("kvatlas_fleet_release", [LEASES], [member_id, *partitions])

    async def leases(self) -> dict[int, str]:
        """Who holds which partition's lease, expired ones left out."""
        flat = await self._fcall("kvatlas_fleet_leases", [LEASES], [])
        return {int(flat[i]): flat[i + 1].decode() for i in range(0, len(flat), 2)}

    async def _packed(self, pool_id: str) -> dict[bytes, bytes]:
        try:
            return dict(await self._store.client.hgetall(pool_workers_key(pool_id)))
        except UNREACHABLE as error:
            raise self._unreachable(error) from error

    async def _workers_of(self, pool_id: str) -> int:
        try:
            return int(await self._store.client.hlen(pool_workers_key(pool_id)))
        except UNREACHABLE as error:
            raise self._unreachable(error) from error

    async def _fcall(self, function: str, keys: Sequence[str], args: Sequence[str | int]) -> list[bytes]:
        try:
            return list(await self._store.fcall(function, keys, args) or [])
        except ResponseError as error:
            if "Function not found" not in str(error):
                raise
            # the first call ever, or somebody flushed the functions: loading them again is always right
            await self._store.load_functions(fleet_library())
            return list(await self._store.fcall(function, keys, args) or [])

    def _unreachable(self, error: BaseException) -> Unreachable:
        return Unreachable(f"{self._store.name}: {reason(error)}")
