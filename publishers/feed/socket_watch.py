"""Compares the batches of the event socket with those of replay. This reveals a wrong port or topic, which would otherwise go
unnoticed: replay fills in, seconds late (pure; times are in seconds on the caller's clock).
"""

from dataclasses import dataclass

from kvatlas_publishers.feed.connection_state import Connection

FOREIGN_S = 2.0
"""How long messages may arrive under other topics before ours counts as wrong, since engines may share a socket."""
LATE_BATCHES = 2
"""Two batches, because a late subscription may lose one."""
REPLAYS_FAILED = 2
"""Two replays, because a busy engine may not answer one."""
_CURE = "set --endpoint to the event socket of the engine's --kv-events-config"
_OFF_CURE = (
    "start the engine with --kv-events-config (events are off without it), or set --endpoint to its event socket"
)
_REPLAY_CURE = "set --replay-endpoint to the replay socket of the engine's --kv-events-config, or leave it out"


@dataclass(frozen=True, slots=True)
class Suspicion:
    """An observation, and what to do about it."""

    seen: str
    cure: str


class SocketWatch:
    """Records which socket delivers what. `suspicion` draws the conclusion."""

    def __init__(self, endpoint: str, replay_endpoint: str | None, topic: str, rank: int | None = None) -> None:
        """`rank`: the data-parallel rank whose sockets these are."""
        self._rank = rank
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._topic = topic
        self._heard = False
        self._foreign: tuple[str, float] | None = None
        self._late_batches = 0
        self._asked = False
        self._replay_answers = False
        self._replays_failed = 0
        self._refused = False

    def record_message(self) -> bool:
        """Record a message of the event socket under our topic. Returns True for the first message since the socket was
        connected."""
        first, self._heard = not self._heard, True
        self._foreign = None
        return first

    def record_foreign_topic(self, topic: bytes, now_s: float) -> None:
        """Record a message of the event socket under another topic."""
        since_s = self._foreign[1] if self._foreign is not None else now_s
        self._foreign = topic.decode(errors="replace"), since_s

    def record_replay(self, *, complete: bool, answered: bool, late_batches: int) -> bool:
        """Record a replay. `complete`: True if it was answered to the end; `answered`: True if it was answered at all.
        `late_batches`: number of replayed batches that the event socket had not announced. Returns True for the first
        unanswered replay since the socket was connected: ask once more."""
        self._replay_answers = complete
        self._replays_failed = 0 if answered else self._replays_failed + 1
        if self._asked:  # the first replay returns batches from before the socket was connected
            self._late_batches += late_batches
        self._asked = True
        return self._replay_endpoint is not None and self._replays_failed == 1

    def record_connect(self) -> None:
        """Record that a publishing socket has connected."""
        self._refused = self._asked = False
        self._late_batches = self._replays_failed = 0

    def record_listener(self) -> None:
        """Record that something listens at the event socket's address. Unless `record_connect` follows at once, it is not an
        event socket."""
        self._refused = True

    def record_disconnect(self) -> None:
        """Record that the socket lost its last connection."""
        self._heard = self._replay_answers = False
        self._foreign, self._late_batches = None, 0

    def suspicion(self, connection: Connection, *, engine_up: bool | None, now_s: float) -> Suspicion | None:
        """What seems wrong with the event socket now. `engine_up=None`: unknown."""
        if self._foreign is not None and now_s - self._foreign[1] >= FOREIGN_S:
            theirs = self._foreign[0]
            seen = f"the engine publishes under topic {theirs!r:.120}, but --topic is {self._topic!r:.120}"
            cure = f"set --topic {theirs!r:.120}" if theirs else "leave --topic out"
            return Suspicion(f"{seen}: events of {self._endpoint} are ignored", cure)
        if connection is Connection.CONNECTED and not self._heard and self._late_batches >= LATE_BATCHES:
            seen = f"event socket {self._endpoint} delivers no events, but replay socket {self._replay_endpoint} does"
            return Suspicion(f"{seen}, up to 15 s late", _CURE)
        if connection is Connection.AWAY and (self._replay_answers or engine_up is not False):
            return self._suspect_address(engine_up)
        return None

    def _suspect_address(self, engine_up: bool | None) -> Suspicion:
        what = "the socket there is not an event socket" if self._refused else "nothing is connected there"
        cure, off_cure = self._of_rank(_CURE), self._of_rank(_OFF_CURE)
        if self._replay_answers:
            seen = f"replay socket {self._replay_endpoint} answers, but event socket {self._endpoint} does not: {what}"
            return Suspicion(seen, cure)
        if engine_up:
            seen = f"the engine is up, but event socket {self._endpoint} does not answer: {what}"
            return Suspicion(seen, cure if self._refused else off_cure)
        seen = f"event socket {self._endpoint} does not answer: {what}"
        return Suspicion(seen, cure if self._refused else f"if the engine runs: {off_cure}")

    def _of_rank(self, cure: str) -> str:
        """The cure for a rank above 0: it may run on a node other than the engine's HTTP address."""
        if not self._rank:
            return cure
        there = f"if rank {self._rank} runs on another node, its event socket is there: set --endpoint to that node"
        return f"{there}, or run the rank's publisher on it; otherwise {cure}"

    def replay_suspicion(self, connection: Connection) -> Suspicion | None:
        """What seems wrong with the replay socket now."""
        if self._replay_endpoint is None or connection is not Connection.CONNECTED:
            return None
        if self._replays_failed < REPLAYS_FAILED:
            return None
        seen = f"event socket {self._endpoint} is connected, but replay socket {self._replay_endpoint} does not answer"
        return Suspicion(f"{seen}: each gap drops all known blocks", _REPLAY_CURE)
