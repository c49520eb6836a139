"""Two publishers of one worker: the older one yields.

Both hear the worker's heartbeats. One that hears a higher incarnation than its own is the older: it tells nothing more,
answers nothing and sends no heartbeats, until the other has been silent for longer than any heartbeat is late; then it
tells all anew, above what it heard. So the index follows one of them, and does not go back and forth.
"""

import logging
from collections.abc import Callable
from time import monotonic

from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.bus.subjects import alive_subject
from kvatlas.bus.subscription import unsubscribe
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import Heartbeat
from kvatlas.runtime.wakeup import Waking
from publishers.counters import PublisherCounters
from publishers.stream.changelog import Telling

SILENT_S = 6.0
"""Longer than routers wait for a heartbeat, much shorter than until a worker is retired."""

log = logging.getLogger("kvatlas.publisher")


class Rivalry:
    """`start`, then `run` until cancelled, then `stop`."""

    def __init__(
        self,
        client: Client,
        worker_id: str,
        telling: Telling,
        counters: PublisherCounters,
        *,
        on_wanted: Callable[[], None],
        silent_s: float = SILENT_S,
    ) -> None:
        """`on_wanted`: a new incarnation is wanted now."""
        self._client = client
        self._worker_id = worker_id
        self._telling = telling
        self._counters = counters
        self._on_wanted = on_wanted
        self._silent_s = silent_s
        self._heard_s = 0.0
        self._heard = Waking()

    async def start(self) -> None:
        """Listen. Raises nats errors if the connection is closed."""
        self._subscription = await self._client.subscribe(alive_subject(self._worker_id), cb=self._on_heartbeat)

    async def run(self) -> None:
        """Take the worker back when the other publisher has fallen silent. While NATS is away nobody is heard."""
        while True:
            if not self._telling.yielded:
                await self._heard.wait()
                continue
            left_s = self._heard_s + self._silent_s - monotonic()
            if not self._client.is_connected:
                self._heard_s = monotonic()
            elif left_s <= 0:
                log.warning("worker %s: the other publisher fell silent: telling goes on here", self._worker_id)
                self._telling.take_back()
                self._on_wanted()
                continue
            await self._heard.wait(max(0.1, left_s))

    async def stop(self) -> None:
        """Listen no longer."""
        await unsubscribe(self._subscription, self._client)

    async def _on_heartbeat(self, msg: Msg) -> None:
        try:
            beat = Heartbeat.unpack(msg.data)
        except InvalidValue:
            return  # not a publisher's: the indexer counts it
        own = self._telling.outbox.incarnation
        if not self._telling.hear(beat.incarnation):
            return
        self._heard_s = monotonic()
        if not self._telling.yielded:
            self._telling.yield_to_other()
            self._counters.yields += 1
            log.warning(
                "worker %s: another publisher tells of it (incarnation %d, here %d): this one yields",
                self._worker_id,
                beat.incarnation,
                own,
            )
        self._heard.wake()
