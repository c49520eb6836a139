"""Pulling from a JetStream consumer without waiting: how much to request, and how to read the server's answers (pure)."""

from dataclasses import dataclass
from enum import Enum, auto

from nats.aio.msg import Msg

ACK_TOKENS = 9
"""`$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>`. If there are a domain and an account
hash, they are two more tokens before the stream, and a random token may follow at the end."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message's place in the stream. `pending`: how many matching messages were left in the stream when it was sent."""

    stream_seq: int
    consumer_seq: int
    pending: int


def parse_delivery(reply: str) -> Delivery:
    """The numbers in a message's reply subject. Raises ValueError for a subject that does not come from JetStream."""
    tokens = reply.split(".")
    if len(tokens) < ACK_TOKENS or tokens[0] != "$JS" or tokens[1] != "ACK":
        raise ValueError(f"reply subject {reply!r}; expected $JS.ACK. and the delivery's numbers")
    first = 5 if len(tokens) == ACK_TOKENS else 7
    return Delivery(int(tokens[first]), int(tokens[first + 1]), int(tokens[first + 3]))


class PullWindow:
    """Messages that were requested but have not been received yet. Each request is for `batch` messages. Up to `requests` of
    them are outstanding, so the server never waits for the next one."""

    __slots__ = ("_batch", "_low", "outstanding")

    def __init__(self, batch: int, requests: int = 2) -> None:
        self._batch = batch
        self._low = batch * (requests - 1)
        self.outstanding = 0

    def is_due(self) -> bool:
        """True if another request is due."""
        return self.outstanding <= self._low

    def add_request(self) -> None:
        self.outstanding += self._batch

    def end_request(self, messages: int) -> None:
        """Record that the server ended a request with this many messages still unsent."""
        self.outstanding = max(0, self.outstanding - messages)


class PullStatus(Enum):
    """The meaning of a message with a status header."""

    IDLE = auto()
    """The consumer is alive and has nothing to deliver at the moment."""
    ENDED = auto()
    """One request is over; the consumer is alive."""
    BROKEN = auto()
    """The consumer, the stream or its leader is gone; a new consumer is needed."""


_REQUEST_ENDS = ("message size exceeds maxbytes", "batch completed", "exceeded max")


def pull_status(msg: Msg) -> PullStatus | None:
    """The status of the pull according to a delivered message; None if it is a message of the stream."""
    if msg.reply.startswith("$JS.ACK."):
        return None
    headers = msg.headers or {}
    status = headers.get("Status")
    if status == "100":
        return PullStatus.IDLE
    if status in ("404", "408"):  # no messages; request timed out
        return PullStatus.ENDED
    if status == "409" and headers.get("Description", "").lower().startswith(_REQUEST_ENDS):
        return PullStatus.ENDED
    return PullStatus.BROKEN  # 409 consumer deleted, leadership change, server shutdown; 503 no responders; others


def messages_returned(msg: Msg) -> int:
    """The number of messages of an ended request that were not sent."""
    text = (msg.headers or {}).get("Nats-Pending-Messages", "0")
    return int(text) if text.isdigit() else 0


def last_consumer_seq(msg: Msg) -> int | None:
    """The seq of the last message that the consumer has sent, if this is a heartbeat of an idle consumer that says so."""
    text = (msg.headers or {}).get("Nats-Last-Consumer", "")
    return int(text) if text.isdigit() else None
