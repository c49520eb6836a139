"""A pool's failing workers, in the pool's slot of the store: their counts, which of them are ejected, and which router is to
try each of them again."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import msgpack

from kvatlas.reservations.redis_calls import call_pool
from kvatlas.store.connection import Store

HALF_LIFE_S = 10.0
"""Counts fade: after this long, an answer only counts half."""
CLAIM_S = 2.0
"""How long a router has the exclusive right to try an ejected worker again."""
KEEP_S = 600.0
"""A worker's record is dropped after this long without a change."""
CHANGES_A_CALL = 200


class Verdict(StrEnum):
    """A change that a router wants to make. `COUNT`: only add to the counts. `PROBE`: try a worker whose ejection is over."""

    COUNT = "count"
    EJECT = "eject"
    READMIT = "readmit"
    PROBE = "probe"


class EjectionChange(NamedTuple):
    """What a router adds to a worker's record: the answers since its last change, and a verdict.

    `times`: the number of ejections that the router knew of. An ejection counts only if that number is still right, so two
    routers that see the same failures eject the worker once. `eject_s`: how long the ejection lasts.
    """

    worker_id: str
    good: float
    bad: float
    verdict: Verdict = Verdict.COUNT
    times: int = 0
    eject_s: float = 0.0


class EjectionRecord(NamedTuple):
    """A worker as all routers know it. `left_s`: the time that is left of its ejection; 0 or less if the ejection is over; None
    if it is not ejected. `times`: the number of recent ejections. `prober`: the router that may try it now; '' for none."""

    good: float
    bad: float
    left_s: float | None
    times: int
    prober: str


class SharedEjections(Protocol):
    """Where routers share what they know about failing workers."""

    async def exchange(
        self, pool_id: str, router_id: str, changes: Sequence[EjectionChange]
    ) -> Mapping[str, EjectionRecord]:
        """Make these changes, then read every record of the pool. Raises Unreachable."""


def ejections_key(pool_id: str) -> str:
    return f"kva:{{pool:{pool_id}}}:ejections"


class EjectionStore:
    """See `SharedEjections`; all times are by the store's clock."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def exchange(
        self, pool_id: str, router_id: str, changes: Sequence[EjectionChange]
    ) -> Mapping[str, EjectionRecord]:
        found: Mapping[str, EjectionRecord] = {}
        for first in range(0, max(1, len(changes)), CHANGES_A_CALL):
            found = await self._exchange(pool_id, router_id, changes[first : first + CHANGES_A_CALL])
        return found

    async def _exchange(
        self, pool_id: str, router_id: str, changes: Sequence[EjectionChange]
    ) -> Mapping[str, EjectionRecord]:
        rows = [(*change[:3], change.verdict.value, change.times, round(change.eject_s * 1e6)) for change in changes]
        times_us = [round(seconds * 1e6) for seconds in (HALF_LIFE_S, CLAIM_S, KEEP_S)]
        args = [router_id, *times_us, msgpack.packb(rows, use_bin_type=False)]
        packed: bytes = await call_pool(self._store, "ejections", pool_id, args, keys=[ejections_key(pool_id)])
        records: Sequence[Sequence[Any]] = msgpack.unpackb(packed)
        return {
            worker_id: EjectionRecord(good, bad, None if left_us is False else left_us / 1e6, times, prober)
            for worker_id, good, bad, left_us, times, prober in records
        }
