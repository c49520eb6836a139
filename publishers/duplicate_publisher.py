"""If two publishers publish the same worker, the older one yields.

Both receive the worker's heartbeats. A publisher that sees a higher incarnation than its own is the older one. It stops
publishing and answering requests, and marks its heartbeats as informational. Once the other publisher has been silent for
longer than any heartbeat can be late, it publishes a new incarnation above the other's. So the index follows only one of
them and does not switch back and forth.
"""

import logging
from time import monotonic, time_ns

from nats.aio.msg import Msg

from kvatlas.bus.connection import unsubscribe
from kvatlas.bus.subjects import alive_subject
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import read_heartbeat
from kvatlas.runtime.wakeup import Wakeup
from kvatlas_publishers.parts import PublisherParts

SILENT_S = 6.0
"""Longer than routers wait for a heartbeat, but much shorter than the time until a worker is retired."""

log = logging.getLogger("kvatlas.publisher")


class DuplicatePublisherWatch:
    """Call `start`, then `run` (until cancelled), then `stop`."""

    def __init__(self, parts: PublisherParts, *, silent_s: float = SILENT_S) -> None:
        """Publishers of other fleets are ignored, as indexers ignore them."""
        self._client = parts.client
        self._worker_id = parts.worker_id
        self._fleet_id = parts.settings.fleet_id
        self._changelog = parts.changelog
        self._counters = parts.counters
        self._log = parts.log
        self._due = parts.due
        self._silent_s = silent_s
        self._heard_s = 0.0
        self._wakeup = Wakeup()

    async def start(self) -> None:
        """Subscribe to the heartbeats. Raises NATS errors if the connection is closed."""
        self._subscription = await self._client.subscribe(alive_subject(self._worker_id), cb=self._on_heartbeat)

    async def run(self) -> None:
        """Take over the worker once the other publisher is silent. Time without a connection to NATS does not count."""
        while True:
            if not self._changelog.yielded:
                await self._wakeup.wait()
                continue
            left_s = self._heard_s + self._silent_s - monotonic()
            if not self._client.is_connected:
                self._heard_s = monotonic()
            elif left_s <= 0:
                log.warning("worker %s: other publisher is silent; taking over", self._worker_id)
                self._changelog.take_over()
                self._due.wake()
                continue
            await self._wakeup.wait(max(0.1, left_s))

    async def stop(self) -> None:
        await unsubscribe(self._subscription, self._client)

    async def _on_heartbeat(self, msg: Msg) -> None:
        try:
            heartbeat = read_heartbeat(msg.data, self._worker_id, time_ns() // 1_000)
        except InvalidValue as error:
            self._counters.heartbeats_bad += 1
            self._log.report(
                "heartbeat", f"invalid heartbeat on {msg.subject}: {error}; check what else publishes there"
            )
            return
        if heartbeat.yielded:
            return
        if (other := heartbeat.fleet_id) is not None and self._fleet_id not in (None, other):
            line = f"a publisher of fleet {other} publishes it here too and is ignored; this one is of fleet {self._fleet_id}"
            self._log.report("fleet", f"{line}; give each fleet its own NATS (or account)")
            return
        own = self._changelog.outbox.incarnation
        if not self._changelog.record_heartbeat(heartbeat.incarnation):
            return
        self._heard_s = monotonic()
        if not self._changelog.yielded:
            self._changelog.yield_worker()
            self._counters.yields += 1
            log.warning(
                "worker %s: another publisher (engine at %s) has a newer incarnation (%d, ours is %d), so this one yields; "
                "give each its own --worker-id",
                self._worker_id,
                heartbeat.endpoint.url or "an unknown address",
                heartbeat.incarnation,
                own,
            )
        self._wakeup.wake()
