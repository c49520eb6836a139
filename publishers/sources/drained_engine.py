"""An engine whose KV events are read over HTTP, each only once (TensorRT-LLM), with its reader and its publisher.

Nothing is saved: events returned after the last save would be lost, and answers don't identify the engine's process. So its
publisher starts empty, and learns of blocks as the engine stores them.
"""

import zmq.asyncio
from nats.aio.client import Client

from kvatlas.settings import PublishSettings
from kvatlas_publishers.feed.dead_letters import DeadLetters
from kvatlas_publishers.feed.event_drain import EventDrain
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.sources.eventless_engine import EventlessEngine


class DrainedEngine(EventlessEngine):
    """One such engine. Its events show when it restarts."""

    def __init__(self, settings: PublishSettings) -> None:
        super().__init__(settings)
        self._dead_letters = DeadLetters(settings.state_dir, self.worker_id)

    def open(self, client: Client, context: zmq.asyncio.Context) -> None:
        """Create the publisher; events are requested over HTTP."""
        self._publisher = publisher = Publisher(self._settings, nats=client, begin=False)
        assert self._settings.engine_url is not None, "settings of a drained engine have its address"
        self._drain = EventDrain(
            self._settings.engine_url,
            self.worker_id,
            publisher.counters,
            publisher.diagnoses,
            self._dead_letters,
            on_batch=publisher.record,
            on_empty=publisher.start_over,
            access=self._settings.engine_access,
        )

    async def _follow(self) -> None:
        await self._drain.run()
