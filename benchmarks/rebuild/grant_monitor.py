"""Observes the indexers' grants for snapshots on the bus."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field

from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.bus.control import GrantReply, GrantRequest
from kvatlas.bus.subjects import ALL_GRANTS
from kvatlas.errors import InvalidValue
from kvatlas.index.protocol import WorkerRecord


@dataclass(slots=True)
class GrantMonitor:
    """Pairs grant requests with their replies; a reply may be received before its request. `outstanding`: snapshots that were
    granted but are not in the index yet."""

    requests: dict[str, GrantRequest] = field(default_factory=dict)
    replies: dict[str, GrantReply] = field(default_factory=dict)
    outstanding: dict[str, GrantRequest] = field(default_factory=dict)
    peak_bytes: int = 0
    granted: int = 0
    refused: int = 0

    async def listen(self, client: Client) -> None:
        await client.subscribe(ALL_GRANTS, cb=self._on_request)
        await client.subscribe("_INBOX.>", cb=self._on_reply)
        await client.flush()

    def complete(self, records: Mapping[str, WorkerRecord]) -> None:
        """Remove the outstanding snapshots that are in the index according to these records."""
        for worker_id, request in list(self.outstanding.items()):
            record = records.get(worker_id)
            if record is not None and record.incarnation >= request.incarnation and not record.loading:
                del self.outstanding[worker_id]

    async def _on_request(self, msg: Msg) -> None:
        self.requests[msg.reply] = GrantRequest.unpack(msg.data)
        self._pair(msg.reply)

    async def _on_reply(self, msg: Msg) -> None:
        with suppress(InvalidValue):  # the reply to another kind of request
            self.replies[msg.subject] = GrantReply.unpack(msg.data)
            self._pair(msg.subject)

    def _pair(self, inbox: str) -> None:
        if inbox not in self.requests or inbox not in self.replies:
            return
        request, reply = self.requests.pop(inbox), self.replies.pop(inbox)
        if reply.granted:
            self.granted += 1
            self.outstanding[request.worker_id] = request
            self.peak_bytes = max(self.peak_bytes, sum(one.snapshot_bytes for one in self.outstanding.values()))
        else:
            self.refused += 1
