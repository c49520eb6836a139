"""An engine that tells no KV events: its pulse and load are told, and that nothing is known of what it holds.

What routers send there is what they predict from (`EngineEndpoint.events`), for one incarnation: another life
of the engine begins another one, with which every prediction ends.
"""

import logging
from collections.abc import Callable

import anyio
import zmq.asyncio
from nats.aio.client import Client

from kvatlas.fleet.records import EngineState
from kvatlas.settings import PublishSettings
from publishers.publisher import Publisher
from publishers.settings import PublisherSettings

log = logging.getLogger("kvatlas.publisher")


class SilentEngine:
    """One such engine rank; the twin of `publishers.sidecar.EngineSidecar`."""

    def __init__(self, settings: PublishSettings) -> None:
        self._settings = PublisherSettings.of(settings)
        self.worker_id = self._settings.worker_id
        self._was_up = False

    def open(self, client: Client, context: zmq.asyncio.Context) -> None:
        """Nothing is read of the engine but its pages."""
        self._publisher = Publisher(self._settings, nats=client, begin=False)

    def close(self) -> None:
        """Nothing stays open."""

    async def run(self, ready: Callable[[Publisher], None]) -> None:
        """Publish until cancelled; after `open`."""
        publisher, poller = self._publisher, self._publisher.poller
        assert poller is not None, "settings without events have the engine's address"
        await poller.poll_once()
        self._was_up = poller.state is EngineState.UP
        poller.on_change = self._changed
        poller.on_restart = lambda: self._begin_again("the engine's process started anew")
        async with publisher:
            publisher.begin_telling()
            try:
                ready(publisher)
                await anyio.sleep_forever()
            finally:
                await publisher.close_gently()

    def _changed(self) -> None:
        """An engine that was away may have lost its cache, also where no page tells when its process started."""
        poller = self._publisher.poller
        assert poller is not None
        if poller.state is EngineState.UP:
            if self._was_up:
                self._begin_again("the engine was away")
            self._was_up = True
        self._publisher.beat()

    def _begin_again(self, why: str) -> None:
        log.warning("worker %s: %s: what it was predicted to hold is forgotten", self.worker_id, why)
        self._publisher.start_over()
