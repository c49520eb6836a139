"""The longest call to the store while something is measured, and which command it was: no call may hold the store long.

It is read from the store's slow log, so it is the time that the store itself spent on the call, without waiting.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from benchmarks.result import Result
from kvatlas.store.connection import Store

LONGEST_MS = 5.0
SHORTEST_US = 1_000
"""Calls below are not logged, so that the log costs nothing and holds all of them."""
KEPT = 4_096
SLOW_LOG = {"slowlog-log-slower-than": str(SHORTEST_US), "slowlog-max-len": str(KEPT)}
"""Settings of a store whose longest call is read later."""
NOT_OURS = frozenset({"CONFIG", "DEBUG", "FLUSHALL", "FLUSHDB", "INFO", "MEMORY", "SLOWLOG"})
"""What benchmarks do around a measurement, and no part of kvatlas."""


@dataclass(frozen=True, slots=True)
class StoreCall:
    """One call. `command`: its name, of a function call with the function's."""

    command: str
    ms: float


class StoreCalls:
    """The longest call so far."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def longest(self) -> StoreCall | None:
        """None where no call took SHORTEST_US."""
        entries = await self._store.client.slowlog_get(KEPT)
        calls = [StoreCall(_name(entry["command"]), entry["duration"] / 1e3) for entry in entries]
        return max((call for call in calls if call.command not in NOT_OURS), key=lambda call: call.ms, default=None)

    async def result(self, during: str) -> Result:
        """The figure beside its budget. `during`: what was measured."""
        call = await self.longest()
        if call is None:
            return Result(f"longest store call, {during}: none above", SHORTEST_US / 1e3, "ms", LONGEST_MS)
        return Result(f"longest store call, {during}: {call.command}", call.ms, "ms", LONGEST_MS)


@asynccontextmanager
async def store_calls(store: Store) -> AsyncIterator[StoreCalls]:
    """Calls from now on; afterwards the store's settings are as before."""
    client = store.client
    before = await client.config_get("slowlog-log-slower-than", "slowlog-max-len")
    await client.config_set("slowlog-max-len", KEPT)
    await client.config_set("slowlog-log-slower-than", SHORTEST_US)
    await client.slowlog_reset()
    try:
        yield StoreCalls(store)
    finally:
        for name, value in before.items():
            await client.config_set(name, value)


def _name(command: bytes) -> str:
    """`FCALL kva_book_1 2 ...` is `FCALL kva_book_1`, `HGETALL key` is `HGETALL`."""
    words = command.decode(errors="replace").split()
    return " ".join(words[:2]) if words[0].upper().startswith("FCALL") else words[0].upper()
