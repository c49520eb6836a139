"""Answers the requests on one of a publisher's subjects (thin)."""

from abc import ABC, abstractmethod

from nats.aio.msg import Msg
from nats.errors import ConnectionClosedError

from kvatlas.bus.connection import unsubscribe
from kvatlas.bus.subjects import is_inbox
from kvatlas.errors import DATA_ERRORS
from kvatlas.fleet.records import WireRecord
from kvatlas_publishers.parts import PublisherParts


class Responder(ABC):
    """Call `start`, then `run` (until cancelled), then `stop`. A publisher that has yielded leaves the answers to the
    other one."""

    def __init__(self, parts: PublisherParts, subject: str) -> None:
        self._parts = parts
        self._client = parts.client
        self._subject = subject

    @abstractmethod
    def reply(self, msg: Msg) -> WireRecord:
        """Execute a request and return the reply. If it raises one of DATA_ERRORS, the request is refused."""

    def refusal(self, error: Exception) -> WireRecord | None:
        """The reply to a refused request; None: no reply."""
        return None

    async def start(self) -> None:
        """Subscribe to requests. Raises nats errors if the connection is closed."""
        self._subscription = await self._client.subscribe(self._subject)

    async def run(self) -> None:
        """Answer until cancelled. Call `start` first."""
        async for msg in self._subscription.messages:
            if not self._parts.changelog.yielded:
                await self._answer(msg)

    async def stop(self) -> None:
        await unsubscribe(self._subscription, self._client)

    async def _answer(self, msg: Msg) -> None:
        if msg.reply and not is_inbox(msg.reply):
            self._refuse(f"its answer would go to {msg.reply[:80]!r}")
            return
        reply: WireRecord | None
        try:
            reply = self.reply(msg)
        except DATA_ERRORS as error:
            self._refuse(str(error))
            reply = self.refusal(error)
        if msg.reply and reply is not None:
            try:
                await self._client.publish(msg.reply, reply.pack())
            except ConnectionClosedError:
                return  # the publisher is being closed

    def _refuse(self, why: str) -> None:
        self._parts.counters.control_bad += 1
        self._parts.log.report(self._subject, f"request on {self._subject} refused: {why}")
