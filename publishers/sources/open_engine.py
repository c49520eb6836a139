"""An engine of the open event forms without a ZMQ socket: its batches are posted to the status page.

Nothing is saved, because missed batches can't be replayed: the publisher starts empty and learns of blocks from new batches.
"""

import logging
from time import monotonic

import zmq.asyncio
from nats.aio.client import Client

from kvatlas.errors import EngineEventError
from kvatlas.settings import PublishSettings
from kvatlas_publishers.engine_events import EngineBatch
from kvatlas_publishers.feed.dead_letters import DeadLetters
from kvatlas_publishers.feed.open_batches import OpenBatches
from kvatlas_publishers.feed.undecodable import STARTING_OVER, Distrust
from kvatlas_publishers.sources.eventless_engine import EventlessEngine

log = logging.getLogger("kvatlas.publisher")


class OpenEngine(EventlessEngine):
    """One such engine."""

    def __init__(self, settings: PublishSettings) -> None:
        super().__init__(settings)
        self._distrust = Distrust()
        self._distrust_unknown = settings.distrust_poison
        self._dead_letters = DeadLetters(settings.state_dir, self.worker_id)

    def open(self, client: Client, context: zmq.asyncio.Context) -> None:
        super().open(client, context)
        self._batches = OpenBatches(self._publisher)

    def take(self, payload: bytes) -> EngineBatch:
        """Record one batch. A payload that is not a batch is counted and kept as a dead letter, and EngineEventError is
        raised. No blocks are dropped, because the caller gets the error and sends the batch again."""
        try:
            batch = self._batches.take(payload)
        except EngineEventError as error:
            counters = self._publisher.counters
            counters.poison_malformed += 1
            counters.poison += 1
            counters.feed_lost += 1
            if not self._dead_letters.keep(str(error), None, payload):
                counters.dead_letters_dropped += 1
            raise
        # some claimed blocks may be gone: see kvatlas_publishers.feed.undecodable
        if batch.has_lost(distrust_unknown=self._distrust_unknown) and self._distrust.record_loss(monotonic()):
            self._start_over("a batch is not fully readable, and may have removed blocks")
        return batch

    def _start_over(self, why: str) -> None:
        log.warning("worker %s: %s; %s", self.worker_id, why, STARTING_OVER)
        self._publisher.start_over()
        self._batches.forget()
