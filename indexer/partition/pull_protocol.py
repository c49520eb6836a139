"""Pulling from a JetStream consumer without waiting: what is asked for, and what the server answers (pure)."""

from dataclasses import dataclass
from enum import Enum, auto

from nats.aio.msg import Msg

ACK_TOKENS = 9
"""`$JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>`; with a domain and an account
hash before the stream there are two more, and perhaps a random one at the end."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Where a message stands. `pending`: messages of the filter still in the stream behind it, when it was sent."""

    stream_seq: int
    consumer_seq: int
    pending: int


def parse_delivery(reply: str) -> Delivery:
    """The numbers of a reply subject that JetStream gave. Raises ValueError for another subject."""
    tokens = reply.split(".")
    if len(tokens) < ACK_TOKENS or tokens[0] != "$JS" or tokens[1] != "ACK":
        raise ValueError(f"reply subject {reply!r}; expected $JS.ACK. and the delivery's numbers")
    first = 5 if len(tokens) == ACK_TOKENS else 7
    return Delivery(int(tokens[first]), int(tokens[first + 1]), int(tokens[first + 3]))


class PullWindow:
    """Messages asked for and not come yet. Requests are of `batch` messages; as many as fit into `batch * requests`
    are outstanding, so that the server never waits for the next one."""

    __slots__ = ("_batch", "_low", "outstanding")

    def __init__(self, batch: int, requests: int = 2) -> None:
        self._batch = batch
        self._low = batch * (requests - 1)
        self.outstanding = 0

    def due(self) -> bool:
        """Should one more request be sent?"""
        return self.outstanding <= self._low

    def sent(self) -> None:
        self.outstanding += self._batch

    def returned(self, messages: int) -> None:
        """The server ended a request that was still owed so many messages."""
        self.outstanding = max(0, self.outstanding - messages)


class PullStatus(Enum):
    """What a message with a status header says."""

    IDLE = auto()
    """The consumer lives and has nothing for us now."""
    ENDED = auto()
    """One request is over; the consumer lives."""
    BROKEN = auto()
    """The consumer, the stream or its leader is gone: start over."""


_REQUEST_ENDS = ("message size exceeds maxbytes", "batch completed", "exceeded max")


def pull_status(msg: Msg) -> PullStatus | None:
    """What a delivered message says of the pull; None for one of the stream."""
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
    """How many messages an ended request was still owed."""
    text = (msg.headers or {}).get("Nats-Pending-Messages", "0")
    return int(text) if text.isdigit() else 0


def idle_at(msg: Msg) -> int | None:
    """The consumer seq after which an idle consumer has nothing, where its heartbeat says so."""
    text = (msg.headers or {}).get("Nats-Last-Consumer", "")
    return int(text) if text.isdigit() else None
