"""What the event socket brings, compared with what replay brings: a wrong port or topic is silent otherwise, since replay fills
in for it, seconds late (pure; times are the caller's seconds).
"""

from dataclasses import dataclass

from publishers.feed.connection_state import Connection

FOREIGN_S = 2.0
"""Another topic may be heard for this long before ours counts as wrong: engines may share a socket."""
LATE_BATCHES = 2
"""One may be lost by a subscription that came too late."""
_CURE = "set --endpoint to the event socket of the engine's --kv-events-config"


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What is seen, and what to do about it."""

    seen: str
    cure: str


class SocketWatch:
    """Records what comes, and from where; `suspicion` says what that means."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str) -> None:
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic
        self._heard = False
        self._foreign: tuple[str, float] | None = None
        self._late_batches = 0
        self._asked = False
        self._replay_answers = False
        self._refused = False

    def record_message(self) -> bool:
        """The event socket brought a message under our topic. True for the first since it was connected."""
        first, self._heard = not self._heard, True
        self._foreign = None
        return first

    def record_foreign_topic(self, topic: bytes, now_s: float) -> None:
        """The event socket brought a message under another topic."""
        since_s = self._foreign[1] if self._foreign is not None else now_s
        self._foreign = topic.decode(errors="replace"), since_s

    def record_replay(self, *, complete: bool, late_batches: int) -> None:
        """`complete`: replay answered to the end. `late_batches`: it brought these, and no message had told of them."""
        self._replay_answers = complete
        if self._asked:  # the first time it brings what was sent before the socket was connected
            self._late_batches += late_batches
        self._asked = True

    def record_connect(self) -> None:
        """A publishing socket is connected."""
        self._refused = self._asked = False
        self._late_batches = 0

    def record_refusal(self) -> None:
        """Something listens at the event socket's address that is no publishing socket."""
        self._refused = True

    def record_disconnect(self) -> None:
        """The socket has no connection any more."""
        self._heard = self._replay_answers = False
        self._foreign, self._late_batches = None, 0

    def suspicion(self, connection: Connection, *, engine_up: bool, now_s: float) -> Suspicion | None:
        """What is wrong now, as far as can be seen. `engine_up`: the engine is known to be up."""
        if self._foreign is not None and now_s - self._foreign[1] >= FOREIGN_S:
            theirs = self._foreign[0]
            seen = f"the engine publishes under topic {theirs!r:.120}, but --topic is {self._topic!r:.120}"
            return Suspicion(f"{seen}: no events are taken from {self._endpoint}", f"set --topic {theirs!r:.120}")
        if connection is Connection.CONNECTED and not self._heard and self._late_batches >= LATE_BATCHES:
            seen = f"event socket {self._endpoint} brings no events, replay socket {self._replay_endpoint} does"
            return Suspicion(f"{seen}, up to 15 s late", _CURE)
        if connection is Connection.AWAY and (self._replay_answers or engine_up):
            there = f"replay socket {self._replay_endpoint} answers" if self._replay_answers else "the engine is up"
            what = "what listens there is no event socket" if self._refused else "nothing is connected there"
            return Suspicion(f"{there}, but event socket {self._endpoint} does not: {what}", _CURE)
        return None
