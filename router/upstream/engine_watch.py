"""Notices engines that hang: they took a request, and neither a byte of its answer nor an answer to a probe comes back."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvatlas.runtime.background_task import BackgroundTask
from kvatlas_router.upstream.engine_client import EngineAway, EngineClient
from kvatlas_router.upstream.patience import wait_patiently

PATIENCE_S = 5.0
"""An engine that sent nothing for this long is probed: it may be computing a long prompt."""
PROBE_S = 2.0
PROBES = 2
"""Probes without an answer, one after another, after which it hangs."""
EVERY_S = 1.0

_log = logging.getLogger("kvatlas_router.proxy")


class WatchedTry:
    """One request at one engine. Call `progress` for each part of its answer."""

    __slots__ = ("_clock", "_task", "hangs", "last", "url")

    def __init__(self, url: str, clock: Callable[[], float]) -> None:
        self.url = url
        self.hangs = False
        self.last = clock()
        self._clock = clock
        self._task = asyncio.current_task()

    def progress(self) -> None:
        """A part of the answer is there."""
        self.last = self._clock()

    def give_up(self) -> None:
        """The engine hangs: cancel what waits for it. `took_cancellation` tells that from other cancellations."""
        self.hangs = True
        if self._task is not None:
            self._task.cancel()

    def took_cancellation(self) -> bool:
        """True if the cancellation just caught was `give_up`; it is over then."""
        if self.hangs and self._task is not None:
            return self._task.uncancel() == 0
        return False


class EngineWatch:
    """Probes `/health` of engines that sent nothing for PATIENCE_S; any answer at all shows that they live."""

    def __init__(
        self, client: EngineClient, patience_s: float = PATIENCE_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """The caller keeps the client, and closes it."""
        self._client = client
        self._patience_s = patience_s
        self._clock = clock
        self._tries: set[WatchedTry] = set()
        self._silent: dict[str, int] = {}
        self._task = BackgroundTask(self._run, "kvatlas engine watch")

    async def __aenter__(self) -> "EngineWatch":
        self._task.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._task.stop()

    @contextmanager
    def watch(self, url: str) -> Iterator[WatchedTry]:
        """Watch the current task's request to this engine."""
        watched = WatchedTry(url, self._clock)
        self._tries.add(watched)
        try:
            yield watched
        finally:
            self._tries.discard(watched)

    async def probe_stalled(self) -> None:
        """Probe the engines of stalled requests once."""
        late = self._clock() - self._patience_s
        stalled = {watched.url for watched in self._tries if watched.last < late}
        self._silent = {url: count for url, count in self._silent.items() if url in stalled}
        await asyncio.gather(*map(self._probe, stalled))

    async def _probe(self, url: str) -> None:
        try:
            await wait_patiently(self._client.call("GET", f"{url.rstrip('/')}/health"), PROBE_S)
        except (EngineAway, TimeoutError) as error:
            self._silent[url] = self._silent.get(url, 0) + 1
            if self._silent[url] < PROBES:
                return
            late = self._clock() - self._patience_s
            stalled = [watched for watched in self._tries if watched.url == url and watched.last < late]
            _log.warning(
                "%s: nothing for %g s, and no answer to %d probes (%s); giving up %d requests there",
                url,
                self._patience_s,
                PROBES,
                str(error) or type(error).__name__,
                len(stalled),
            )
            for watched in stalled:
                watched.give_up()
        else:
            self._silent.pop(url, None)

    async def _run(self) -> None:
        while self._task.running:
            await asyncio.sleep(min(EVERY_S, self._patience_s))
            await self.probe_stalled()
