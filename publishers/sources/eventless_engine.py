"""An engine without KV events. What is published is its heartbeat, its load, and the fact that its residency is unknown.

Routers predict its blocks from the requests they send it (`EngineEndpoint.events`), within one incarnation. When the engine
restarts, a new incarnation begins and ends all predictions.
"""

import logging
from collections.abc import Callable

import anyio
import zmq.asyncio
from nats.aio.client import Client

from kvatlas.fleet.records import EngineState
from kvatlas.settings import PublishSettings
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.settings import PublisherSettings

log = logging.getLogger("kvatlas.publisher")


class EventlessEngine:
    """One such engine rank. It has the methods of `kvatlas_publishers.sidecar.EngineSidecar`.

    Engines whose events come without a socket derive from it: `_follow` reads them, `_start_over` drops what they reported."""

    def __init__(self, settings: PublishSettings) -> None:
        self._settings = PublisherSettings.of(settings)
        self.worker_id = self._settings.worker_id
        self._was_up = False

    def open(self, client: Client, context: zmq.asyncio.Context) -> None:
        """Create the publisher; no socket is opened."""
        self._publisher = Publisher(
            self._settings,
            nats=client,
            begin=False,
            on_engine_change=self._on_engine_change,
            on_engine_restart=lambda: self._start_over("engine restarted"),
        )

    def close(self) -> None:
        """Do nothing: no socket is open."""

    async def run(self, ready: Callable[[Publisher], None]) -> None:
        """Publish until cancelled, or until the events end. Call `open` first."""
        publisher = self._publisher
        if publisher.engine.poller is not None:
            await publisher.engine.poller.poll_once()
        async with publisher:
            publisher.begin_publishing()
            try:
                ready(publisher)
                await self._follow()
            finally:
                await publisher.close_gently()

    async def _follow(self) -> None:
        """Follow the engine's events until cancelled, or until they end."""
        await anyio.sleep_forever()

    def _on_engine_change(self, state: EngineState) -> None:
        """Handle a change in the engine's state: an engine that was down may have lost its cache, even if no page says when
        its process started."""
        if state is EngineState.UP:
            if self._was_up:
                self._start_over("engine is up again")
            self._was_up = True

    def _start_over(self, why: str) -> None:
        log.warning("worker %s: %s; dropping all predictions of its cache", self.worker_id, why)
        self._publisher.start_over()
