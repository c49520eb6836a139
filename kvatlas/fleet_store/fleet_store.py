"""Fleet state in the store: worker records by pool, indexer processes (members), and the leases of the latter.

    kva:{fleet}:members   HASH  member id -> expiry (ms of the store's clock)
    kva:{fleet}:leases    HASH  partition -> "<expiry ms> <member id>"
    (layouts with a number other than 0: kva:{fleet}:members:<number>, kva:{fleet}:leases:<number>)
    kva:{fleet}:pools     SET   pool ids
    kva:{fleet}:departed  HASH  workers that were retired within the last hour: `kvatlas/fleet_store/departures.py`
    kva:{fleet}:objects:newer:<tenant>   HASH  id of an object that an engine keeps -> worker id; also ...:older:<tenant>
    kva:{fleet}:objects:tenants          ZSET  tenant, '' for the only one -> seconds at which it last made one
    kva:{fleet}:limit:<kind>:<client>   HASH  what a client may use: `kvatlas/fleet_store/allowances.py`
    kva:{pool:<id>}:workers   HASH  worker id -> FleetRecord; the pool's other keys: `kvatlas/reservations/functions/_pool.lua`

Leases only save work; correctness does not depend on them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import FleetRecord
from kvatlas.fleet_store.allowances import Draw, Drawn, allowance_key
from kvatlas.fleet_store.departures import Departure, forget_departures, read_departures, record_departure
from kvatlas.reservations.protocol import WorkerReport
from kvatlas.reservations.redis import write_reports
from kvatlas.reservations.redis_calls import POOL_LIBRARY, call_pool, pool_keys
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.store.connection import Store
from kvatlas.store.function_library import FunctionLibrary

MEMBERS = "kva:{fleet}:members"
LEASES = "kva:{fleet}:leases"
POOLS = "kva:{fleet}:pools"
OBJECTS = "kva:{fleet}:objects"
MOST_OBJECTS = 100_000
"""Maximum number of newer objects, and of older ones, which the tenants share equally: 20 MB of the store in all."""
OBJECTS_A_CALL = 512
KEEP_OBJECTS_S = 7 * 24 * 3600

RECORDS_A_SLICE = 16
"""How many records, at 30 us each, are unpacked before other tasks get their turn."""

log = logging.getLogger("kvatlas.fleet")

FLEET_LIBRARY = FunctionLibrary(
    "kvatlas_fleet", Path(__file__).parent / "functions", ("_register", "_clock", "_leases")
)


def members_key(layout: int) -> str:
    return f"{MEMBERS}:{layout}" if layout else MEMBERS


def leases_key(layout: int) -> str:
    return f"{LEASES}:{layout}" if layout else LEASES


def pool_workers_key(pool_id: str) -> str:
    return pool_keys(pool_id)[0]


def object_keys(tenant_id: str | None) -> tuple[str, str, str]:
    """The keys of a tenant's newer objects, of its older objects, and of all tenants. `None`: there is only one tenant."""
    return f"{OBJECTS}:newer:{tenant_id or ''}", f"{OBJECTS}:older:{tenant_id or ''}", f"{OBJECTS}:tenants"


class FleetStore:
    """The part of the store that belongs to the fleet. Every call raises Unreachable if the store does not answer."""

    def __init__(
        self, store: Store, on_refused: Callable[[str, InvalidValue], None] | None = None, *, layout: int = 0
    ) -> None:
        """`on_refused(worker, error)` is called for a record that can't be read; by default, a line is logged. `layout`: the
        number of the layout whose members and leases are meant; workers belong to all layouts."""
        self._store = store
        self._members, self._leases = members_key(layout), leases_key(layout)
        self._log = RateLimitedLog(log)
        self.pools_repaired = 0
        """How many load reports have found damaged records in a pool."""
        self._on_refused = on_refused or _log_refused
        self._read: dict[str, dict[bytes, tuple[bytes, FleetRecord]]] = {}
        """The records that were read last, by pool, both packed and unpacked: unpacking takes 30 us, and records change once a
        second."""

    async def load_functions(self) -> None:
        """Load this version's fleet and pool functions into the store. Raises Unreachable or OutOfMemoryError."""
        for library in (FLEET_LIBRARY, POOL_LIBRARY):
            await library.load(self._store)

    # ------------------------------------------------------------ workers

    async def write(self, records: Mapping[str, FleetRecord]) -> None:
        """Write workers' records, and report their load. Only the owner of a worker's partition may call this."""
        by_pool: dict[str, dict[str, tuple[bytes, WorkerReport]]] = {}
        now_us = time.time_ns() // 1_000
        for worker_id, record in records.items():
            report = WorkerReport.of(record, now_us)
            by_pool.setdefault(record.endpoint.pool_id, {})[worker_id] = record.pack(), report
        for pool_id, reports in by_pool.items():
            if damage := await write_reports(self._store, pool_id, reports):
                self.pools_repaired += damage.times
                line = f"pool {pool_id}: damaged in the store ({damage.what:.200}); its bookings and loads were dropped"
                self._log.report(pool_id, line)
        if by_pool:
            await self._call("kvatlas_fleet_pools", [POOLS], list(by_pool))

    async def update_existing(self, records: Mapping[str, FleetRecord]) -> None:
        """Write the records that differ from what their pool holds. Skips workers that are not (or no longer) in the pool."""
        by_pool: dict[str, list[str]] = {}
        for worker_id, record in records.items():
            by_pool.setdefault(record.endpoint.pool_id, []).append(worker_id)
        wrong: dict[str, FleetRecord] = {}
        for pool_id, worker_ids in by_pool.items():
            found = await self._store.ask(self._store.client.hmget(pool_workers_key(pool_id), worker_ids))
            for worker_id, packed in zip(worker_ids, found, strict=True):
                if packed is not None and packed != records[worker_id].pack():
                    wrong[worker_id] = records[worker_id]
        await self.write(wrong)

    async def forget(self, worker_id: str, pool_id: str) -> None:
        """Remove a worker and all its bookings from its pool. A pool without workers is removed too."""
        await call_pool(self._store, "forget", pool_id, [worker_id])
        if not await self._count_workers(pool_id):
            await self._call("kvatlas_fleet_no_pool", [POOLS], [pool_id])
            if await self._count_workers(pool_id):  # another owner has written one of its workers in the meantime
                await self._call("kvatlas_fleet_pools", [POOLS], [pool_id])

    async def record_departure(self, record: FleetRecord) -> None:
        """Record that this worker was retired. The entry lasts for an hour."""
        await record_departure(self._store, record)

    async def forget_departures(self, worker_ids: Collection[str]) -> None:
        """Remove the departures of workers that are back."""
        await forget_departures(self._store, worker_ids)

    async def departures(self, now_us: int) -> dict[str, Departure]:
        """Workers that were retired within the hour before `now_us` (the store's time) and are not back."""
        return await read_departures(self._store, now_us)

    async def pool(self, pool_id: str) -> dict[str, FleetRecord]:
        """The workers of one pool, except those whose record has an unknown form."""
        found, before = await self._packed_records(pool_id), self._read.get(pool_id, {})
        now: dict[bytes, tuple[bytes, FleetRecord]] = {}
        unpacked = 0
        for worker_id, packed in found.items():
            known = before.get(worker_id)
            if known is None or known[0] != packed:
                unpacked += 1
                if unpacked % RECORDS_A_SLICE == 0:
                    await asyncio.sleep(0)  # let choices go on in the meantime
                try:
                    known = packed, _read_record(worker_id, packed)
                except InvalidValue as error:
                    self._on_refused(_name_of(worker_id), error)
                    continue
            now[worker_id] = known
        self._read[pool_id] = now
        return {_name_of(worker_id): record for worker_id, (_, record) in now.items()}

    async def pools(self) -> list[str]:
        """Every pool that has workers, sorted."""
        return sorted(_name_of(pool_id) for pool_id in await self._store.ask(self._store.client.smembers(POOLS)))

    async def all(self) -> dict[str, FleetRecord]:
        """Every worker of every pool."""
        records: dict[str, FleetRecord] = {}
        for pool_id in await self.pools():
            records.update(await self.pool(pool_id))
        return records

    async def entries(self, which: Callable[[str, str], bool]) -> list[tuple[str, str, FleetRecord | None]]:
        """(worker, pool, record) for each entry for which `which(worker, pool)` is true. The record is None if its form is
        unknown."""
        entries: list[tuple[str, str, FleetRecord | None]] = []
        for pool_id in await self.pools():
            for name, packed in (await self._packed_records(pool_id)).items():
                if which(worker_id := _name_of(name), pool_id):
                    try:
                        entries.append((worker_id, pool_id, _read_record(name, packed)))
                    except InvalidValue:
                        entries.append((worker_id, pool_id, None))
        return entries

    # ------------------------------------------------------------ indexer processes and their leases

    async def renew_membership(self, member_id: str, ttl_ms: int) -> list[str]:
        """Record that this member stays alive for `ttl_ms` from now. Returns the live members, including this one, sorted."""
        live = await self._call("kvatlas_fleet_beat", [self._members], [member_id, ttl_ms])
        return sorted(member.decode() for member in live)

    async def is_member(self, member_id: str) -> bool:
        """True if the store knows this member, whether it is alive or has expired."""
        return bool(await self._store.ask(self._store.client.hexists(self._members, member_id)))

    async def end_membership(self, member_id: str) -> None:
        """Give up the membership and all leases immediately."""
        await self._call("kvatlas_fleet_leave", [self._members, self._leases], [member_id])

    async def claim_leases(self, member_id: str, ttl_ms: int, partitions: Sequence[int]) -> list[int]:
        """Take or renew those leases among `partitions` that are free, expired or the member's own already. Returns the
        partitions whose leases the member now holds, in ascending order."""
        if not partitions:
            return []
        held = await self._call("kvatlas_fleet_claim", [self._leases], [member_id, ttl_ms, *partitions])
        return sorted(int(partition) for partition in held)

    async def release_leases(self, member_id: str, partitions: Sequence[int]) -> None:
        """Release the member's own leases among `partitions`."""
        if partitions:
            await self._call("kvatlas_fleet_release", [self._leases], [member_id, *partitions])

    async def leases(self) -> dict[int, str]:
        """The holder of each partition's lease, not counting expired ones."""
        flat = await self._call("kvatlas_fleet_leases", [self._leases], [])
        return {int(partition): member.decode() for partition, member in zip(flat[::2], flat[1::2], strict=True)}

    # ------------------------------------------------------------ objects that engines keep

    async def put_objects(self, holders: Mapping[str, str], tenant_id: str | None = None) -> None:
        """Record which worker has each of a tenant's objects, by object id. The tenant's oldest objects are dropped."""
        pairs = [text for pair in holders.items() for text in pair]
        fixed: list[str | int] = [MOST_OBJECTS, KEEP_OBJECTS_S, tenant_id or ""]
        for first in range(0, len(pairs), 2 * OBJECTS_A_CALL):
            some = pairs[first : first + 2 * OBJECTS_A_CALL]
            await self._call("kvatlas_fleet_put_objects", object_keys(tenant_id), [*fixed, *some])

    async def find_object(self, id: str, tenant_id: str | None = None) -> str | None:
        """The worker that has a tenant's object, if it is known."""
        found = await self._call("kvatlas_fleet_find_object", object_keys(tenant_id)[:2], [id])
        return found[0].decode() if found else None

    # ------------------------------------------------------------ what clients may use

    async def draw(self, draws: Sequence[Draw]) -> Sequence[Drawn]:
        """See `SharedAllowances`; at most ALLOWANCES_A_CALL draws."""
        args = [number for one in draws for number in one[1:]]
        flat = await FLEET_LIBRARY.call(
            self._store, "kvatlas_fleet_draw", [allowance_key(one.name) for one in draws], args
        )
        return [Drawn(taken, left) for taken, left in zip(flat[::2], flat[1::2], strict=True)]

    # ------------------------------------------------------------ pieces

    async def _packed_records(self, pool_id: str) -> dict[bytes, bytes]:
        return dict(await self._store.ask(self._store.client.hgetall(pool_workers_key(pool_id))))

    async def _count_workers(self, pool_id: str) -> int:
        return int(await self._store.ask(self._store.client.hlen(pool_workers_key(pool_id))))

    async def _call(self, function: str, keys: Sequence[str], args: Sequence[str | int]) -> list[bytes]:
        return list(await FLEET_LIBRARY.call(self._store, function, keys, args) or [])


def _read_record(worker_id: bytes, packed: bytes) -> FleetRecord:
    """Read a record. Raises InvalidValue if its form is unknown, or if it belongs to a different worker."""
    record = FleetRecord.unpack(packed)
    if record.endpoint.id != _name_of(worker_id):
        raise InvalidValue(f"FleetRecord of worker {record.endpoint.id}; expected {_name_of(worker_id)}")
    return record


def _name_of(field: bytes) -> str:
    """The name in a field, even if it is not valid UTF-8, since any client may have written it."""
    return field.decode(errors="backslashreplace")


_refusals = RateLimitedLog(log)


def _log_refused(worker_id: str, error: InvalidValue) -> None:
    _refusals.report(worker_id, f"worker {worker_id:.64}: fleet record ignored: {error}")
