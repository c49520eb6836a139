"""Answers routers that ask for the engine's own hashes of a prompt's blocks."""

from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.bus.hash_requests import EngineHashesReply, EngineHashesRequest
from kvatlas.bus.subjects import hashes_subject
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas_publishers.control_requests.named_blocks import hashes_along
from kvatlas_publishers.control_requests.responder import Responder
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.stream.changelog import Changelog


class EngineHashesResponder(Responder):
    """Answers requests on the publisher's subject for engine hashes. A refused request gets no reply."""

    def __init__(
        self, client: Client, worker_id: str, changelog: Changelog, counters: PublisherCounters, log: RateLimitedLog
    ) -> None:
        super().__init__(client, hashes_subject(worker_id), changelog, counters, log)
        self._worker_id = worker_id

    def reply(self, msg: Msg) -> EngineHashesReply:
        asked = EngineHashesRequest.unpack(msg.data)
        found = hashes_along(self._changelog.ledger.lineage, asked.scope.scope_id, asked.sequence_hashes)
        return EngineHashesReply(worker_id=self._worker_id, hashes=found)
