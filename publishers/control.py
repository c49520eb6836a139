"""Answers what is asked of a publisher on its control subject: a snapshot, its status, its digest (thin)."""

from collections.abc import Callable
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import ConnectionClosedError

from kvatlas.blocks.digest import Digest
from kvatlas.bus.control import ControlOp, ControlReply, ControlRequest, ScopeDigest
from kvatlas.bus.subjects import control_subject
from kvatlas.bus.subscription import unsubscribe
from kvatlas.errors import InvalidValue
from kvatlas.runtime.rate_limited_log import Complaints
from publishers.counters import PublisherCounters
from publishers.ledger.ledger import Ledger
from publishers.stream.changelog import Telling

MOST_SCOPES = 1_000
"""A reply with more would not fit a message of the bus."""


class ControlDesk:
    """`start`, then `run`, then `stop`."""

    def __init__(
        self,
        client: Client,
        worker_id: str,
        telling: Telling,
        counters: PublisherCounters,
        complaints: Complaints,
        *,
        status: Callable[[], dict[str, Any]],
        on_wanted: Callable[[], None],
        checkpoint: Callable[[], None],
    ) -> None:
        """`on_wanted`: a new incarnation is wanted now. `checkpoint` folds and tells what is pending, and a checkpoint."""
        self._client = client
        self._worker_id = worker_id
        self._telling = telling
        self._counters = counters
        self._complaints = complaints
        self._status = status
        self._on_wanted = on_wanted
        self._checkpoint = checkpoint

    async def start(self) -> None:
        """Listen. Raises nats errors if the connection is closed."""
        self._subscription = await self._client.subscribe(control_subject(self._worker_id))

    async def run(self) -> None:
        """Answer until cancelled; after `start`."""
        async for msg in self._subscription.messages:
            await self._answer(msg)

    async def stop(self) -> None:
        """Listen no longer."""
        await unsubscribe(self._subscription, self._client)

    async def _answer(self, msg: Msg) -> None:
        self._counters.control_requests += 1
        if self._telling.yielded:
            return  # it is the other publisher's to answer
        try:
            reply = self.reply(ControlRequest.unpack(msg.data))
        except InvalidValue as error:
            self._counters.control_bad += 1
            self._complaints.say("control", f"control request refused: {error}")
            reply = self._make(ok=False, note=str(error))
        if msg.reply:
            try:
                await self._client.publish(msg.reply, reply.pack())
            except ConnectionClosedError:
                return  # the publisher is being closed: nobody is answered any more

    def reply(self, request: ControlRequest) -> ControlReply:
        """What is answered to a request, after it was acted upon. Raises InvalidValue for an impossible `above`."""
        match request.op:
            case ControlOp.SNAPSHOT:
                self._counters.snapshot_requests += 1
                if not self._telling.request(request.above):
                    self._counters.snapshot_requests_ignored += 1
                    return self._make(note=f"incarnation {self._telling.outbox.incarnation} is above it already")
                self._on_wanted()
                return self._make()
            case ControlOp.STATUS:
                return self._make(status=self._status())
            case ControlOp.DIGEST:
                self._checkpoint()
                telling = self._telling
                if telling.wanted is not None or not telling.outbox.incarnation:
                    return self._make(ok=False, note="a new incarnation is about to begin")
                told = {"told_seq": telling.outbox.next_seq - 1}
                scopes = digests_by_scope(telling.ledger)
                return self._make(digest=telling.ledger.digest.words, scopes=scopes, status=told)

    def _make(self, *, ok: bool = True, **fields: Any) -> ControlReply:
        outbox = self._telling.outbox
        return ControlReply(
            ok=ok, worker_id=self._worker_id, incarnation=outbox.incarnation, acked_seq=outbox.acked_seq, **fields
        )


def digests_by_scope(ledger: Ledger) -> list[ScopeDigest] | None:
    """What the ledger announces, counted anew; None for more scopes than fit one reply."""
    digests: dict[bytes, Digest] = {}
    for chunk in ledger.snapshot():
        digests.setdefault(chunk.scope_id, Digest()).add(chunk.scope_id, chunk.tier, chunk.hashes)
    if len(digests) > MOST_SCOPES:
        return None
    scopes = [(ledger.uses[scope_id].scope, digest) for scope_id, digest in digests.items()]
    return [
        ScopeDigest(
            model_id=scope.model_id,
            tokenizer_id=scope.tokenizer_id,
            adapter_id=scope.adapter_id,
            tenant_id=scope.tenant_id,
            digest=digest.words,
        )
        for scope, digest in scopes
    ]
