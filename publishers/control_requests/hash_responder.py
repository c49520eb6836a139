"""Answers routers that ask for the engine's own hashes of a prompt's blocks."""

from nats.aio.msg import Msg

from kvatlas.bus.hash_requests import EngineHashesReply, EngineHashesRequest
from kvatlas.bus.subjects import hashes_subject
from kvatlas_publishers.control_requests.named_blocks import hashes_along
from kvatlas_publishers.control_requests.responder import Responder
from kvatlas_publishers.parts import PublisherParts


class EngineHashesResponder(Responder):
    """Answers requests on the publisher's subject for engine hashes. Refused requests get no reply."""

    def __init__(self, parts: PublisherParts) -> None:
        super().__init__(parts, hashes_subject(parts.worker_id))

    def reply(self, msg: Msg) -> EngineHashesReply:
        asked = EngineHashesRequest.unpack(msg.data)
        found = hashes_along(self._parts.changelog.ledger.lineage, asked.scope.scope_id, asked.sequence_hashes)
        return EngineHashesReply(worker_id=self._parts.worker_id, hashes=found)
