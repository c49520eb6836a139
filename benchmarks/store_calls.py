"""The longest store call during a measurement, and its command: no call may occupy the store for long.

Its time comes from the store's slow log, so it is wall-clock time and may include time in which other programs ran;
`TimedStore` measures the call's CPU time too. Loading a function library is a separate figure: a server compiles each of
the three once per version (3 to 4 ms of CPU time), when the first process of that version starts, not while requests are
routed.
"""

from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

from benchmarks.result import Result
from kvatlas.store.access import RedisAccess
from kvatlas.store.connection import Store

T = TypeVar("T")

LONGEST_MS = 5.0
SHORTEST_US = 3_000
"""Shorter calls are not logged, so the log has room for all others and costs nothing: deleting thousands of its entries makes
the allocator clean up in the next call, for 5 ms of CPU time."""
KEPT = 4_096
SLOW_LOG = {"slowlog-log-slower-than": str(SHORTEST_US), "slowlog-max-len": str(KEPT)}
"""Settings of a store whose longest call is read later."""
NOT_OURS = frozenset({"CONFIG", "DEBUG", "FLUSHALL", "FLUSHDB", "INFO", "MEMORY", "SLOWLOG"})
"""Commands that benchmarks run around a measurement; they are not part of kvatlas."""
LOADING = "FUNCTION"


@dataclass(frozen=True, slots=True)
class StoreCall:
    """One call. `command`: its name, with the function's name for a function call."""

    command: str
    ms: float


class StoreCalls:
    """The longest calls so far; None if no call took SHORTEST_US."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def longest(self) -> StoreCall | None:
        """The longest call that did not load functions."""
        return _longest(call for call in await self._slow() if call.command != LOADING)

    async def longest_load(self) -> StoreCall | None:
        """The longest call that loaded functions."""
        return _longest(call for call in await self._slow() if call.command == LOADING)

    async def result(self, during: str) -> Result:
        """The figure with its budget. `during`: what was measured."""
        call, load = await self.longest(), await self.longest_load()
        ms = SHORTEST_US / 1e3 if call is None else call.ms
        what = "none above" if call is None else call.command
        beside = f" (functions loaded, once a version: {load.ms:.1f} ms)" if load is not None else ""
        return Result(f"longest store call, {during}: {what}{beside}", ms, "ms", LONGEST_MS)

    async def _slow(self) -> list[StoreCall]:
        found = await self._store.client.slowlog_get(KEPT)
        entries = [entry for node in found.values() for entry in node] if isinstance(found, dict) else found
        calls = [StoreCall(_name(entry["command"]), entry["duration"] / 1e3) for entry in entries]
        return [call for call in calls if call.command not in NOT_OURS]


class CallTimes(NamedTuple):
    """The times of one call, in ms. `waited`: how long the server's main thread waited for a processor that other programs
    used."""

    processor: float
    clock: float
    waited: float
    command: str


class TimedStore(Store):
    """Measures each call by the CPU time of the server's main thread, and by the clock (the slow log). One call at a
    time; Linux only, since the times are those of /proc."""

    NOTED_MS = 1.0
    """Shorter calls are not recorded."""

    def __init__(self, store: Store, server_pid: int) -> None:
        super().__init__(store.client, RedisAccess(store.url))
        self._times = Path(f"/proc/{server_pid}/schedstat")
        self._log_id = -1
        """The id of the last slow log entry that was read."""
        self._execute = store.client.execute_command
        self.client.execute_command = self._execute_timed
        self.forget()

    async def open(self) -> None:
        """Set up the server's slow log; it never has more than a few entries."""
        await self._execute("CONFIG SET", "slowlog-log-slower-than", int(self.NOTED_MS * 1e3), "slowlog-max-len", 8)

    def forget(self) -> None:
        """Forget the longest calls so far."""
        self.by_processor = self.by_clock = CallTimes(0.0, 0.0, 0.0, "none above")

    async def _call(self, commands: Sequence[tuple[Any, ...]], *, retry: bool) -> list[Any]:
        return await self._timed(super()._call(commands, retry=retry), " ".join(map(str, commands[0][:2])))

    async def _execute_timed(self, *command: Any, **options: Any) -> Any:
        if command[0].split()[0] in NOT_OURS | {LOADING}:
            return await self._execute(*command, **options)
        return await self._timed(self._execute(*command, **options), command[0])

    async def _timed(self, call: Awaitable[T], command: str) -> T:
        processor, waited = self._read_times()
        began = perf_counter()
        answer = await call
        took_ms = (perf_counter() - began) * 1e3
        if took_ms >= self.NOTED_MS:
            processor_after, waited_after = self._read_times()
            clock = await self._logged_ms()
            times = CallTimes(processor_after - processor, clock, waited_after - waited, command)
            self.by_processor = max(self.by_processor, times)
            self.by_clock = max(self.by_clock, times, key=lambda one: one.clock)
        return answer

    async def _logged_ms(self) -> float:
        """The last call's duration according to the slow log; 0 for a short one."""
        entries = [one for one in await self.client.slowlog_get(8) if one["id"] > self._log_id]
        self._log_id = max([self._log_id, *(one["id"] for one in entries)])
        return max((one["duration"] / 1e3 for one in entries if _name(one["command"]) not in NOT_OURS), default=0.0)

    def _read_times(self) -> tuple[float, float]:
        """CPU time and waiting time of the server's main thread so far, ms."""
        processor, waited, _ = self._times.read_text().split()
        return int(processor) / 1e6, int(waited) / 1e6


@asynccontextmanager
async def store_calls(store: Store) -> AsyncIterator[StoreCalls]:
    """Record calls from now on; afterwards the store's settings are restored."""
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


def _longest(calls: Iterable[StoreCall]) -> StoreCall | None:
    return max(calls, key=lambda call: call.ms, default=None)


def _name(command: bytes) -> str:
    """The name of a command: `FCALL kva_book_1` for `FCALL kva_book_1 2 ...`, `HGETALL` for `HGETALL key`."""
    words = command.decode(errors="replace").split()
    return " ".join(words[:2]) if words[0].upper().startswith("FCALL") else words[0].upper()
