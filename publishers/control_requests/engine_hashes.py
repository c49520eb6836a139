"""Answers routers that ask for the engine's own hashes of a prompt's blocks (thin)."""

from nats.aio.client import Client
from nats.errors import ConnectionClosedError

from kvatlas.bus.connection import unsubscribe
from kvatlas.bus.engine_hashes import EngineHashesReply, EngineHashesRequest
from kvatlas.bus.subjects import hashes_subject, is_inbox
from kvatlas.errors import DATA_ERRORS
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas_publishers.control_requests.named_blocks import hashes_along
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.stream.changelog import Changelog


class EngineHashesResponder:
    """Call `start`, then `run` (until cancelled), then `stop`."""

    def __init__(
        self, client: Client, worker_id: str, changelog: Changelog, counters: PublisherCounters, log: RateLimitedLog
    ) -> None:
        self._client = client
        self._worker_id = worker_id
        self._changelog = changelog
        self._counters = counters
        self._log = log

    async def start(self) -> None:
        """Subscribe to requests. Raises nats errors if the connection is closed."""
        self._subscription = await self._client.subscribe(hashes_subject(self._worker_id))

    async def run(self) -> None:
        """Answer until cancelled; after `start`."""
        async for msg in self._subscription.messages:
            if self._changelog.yielded or not is_inbox(msg.reply):
                continue
            try:
                asked = EngineHashesRequest.unpack(msg.data)
                scope_id = asked.scope.scope_id
            except DATA_ERRORS as error:
                self._counters.control_bad += 1
                self._log.report("control", f"request for block hashes refused: {error}")
                continue
            found = hashes_along(self._changelog.ledger.lineage, scope_id, asked.sequence_hashes)
            try:
                await self._client.publish(msg.reply, EngineHashesReply(worker_id=self._worker_id, hashes=found).pack())
            except ConnectionClosedError:
                return  # the publisher is being closed

    async def stop(self) -> None:
        """Unsubscribe."""
        await unsubscribe(self._subscription, self._client)
