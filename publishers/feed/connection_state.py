"""State of the connection to an engine's event socket, and the feed's next task (pure; times are in seconds on the
caller's clock).

    CONNECTING --connected--> CONNECTED --disconnected--> LOST --GRACE_S--> AWAY --connected--> CONNECTED
         `--------------------GRACE_S---------------------------------------^

ZMQ reconnects automatically, so the engine counts as down only after its connection has been lost for GRACE_S.

The feed's next task is the first of these that applies:

    RESTART     the engine's process was replaced
    RECONNECT   the connection was lost and is back: request a replay of the batches missed in the meantime
    TAKE        a message arrived
    PROBE       first connection, or silence: check by replay whether a last batch was lost. The pause doubles each time
"""

from enum import Enum, auto

from kvatlas.runtime.backoff import Backoff

GRACE_S = 3.0
"""A connection may be lost for this long before the engine counts as down."""
FIRST_SILENCE_S = 2.0
LONGEST_SILENCE_S = 15.0


class Connection(Enum):
    """State of the connection."""

    CONNECTING = auto()
    CONNECTED = auto()
    LOST = auto()
    AWAY = auto()

    @property
    def alive(self) -> bool:
        """True if the engine is up, judging by the connection."""
        return self in (Connection.CONNECTED, Connection.LOST)


class Task(Enum):
    """The feed's next task."""

    WAIT = auto()
    TAKE = auto()
    PROBE = auto()
    RECONNECT = auto()
    RESTART = auto()


class ConnectionState:
    """Records connection events and decides the feed's next task. Call `next_task`, then `finish`."""

    def __init__(self, first_silence_s: float, now_s: float) -> None:
        self._connections = 0  # a bound socket may have several
        self._connected_once = False
        self._lost_s = now_s
        self._quiet_since_s = now_s
        self._silence = Backoff(first_silence_s, LONGEST_SILENCE_S)
        self._silence_s = self._silence.next_s()
        self._was_lost = False
        self._restart_due = self._reconnect_due = self._probe_due = False

    # ---------------------------------------------------------------- what happened

    def record_connect(self) -> None:
        """Record that the socket has one more connection."""
        self._connections += 1
        self._connected_once = True
        self._probe_due = True  # ask at once for batches sent before
        self._reconnect_due = self._reconnect_due or self._was_lost
        self._was_lost = False

    def record_disconnect(self, now_s: float) -> None:
        """Record that the socket lost one connection."""
        self._connections = max(0, self._connections - 1)
        self._was_lost = self._was_lost or not self._connections
        self._lost_s = now_s

    def record_restart(self) -> None:
        """Record that the engine's process was replaced."""
        self._restart_due = True

    def request_probe(self) -> None:
        """Request a replay once no message is waiting."""
        self._probe_due = True

    # ---------------------------------------------------------------- what follows

    @property
    def connected(self) -> bool:
        return self._connections > 0

    def connection(self, now_s: float) -> Connection:
        if self._connections:
            return Connection.CONNECTED
        if now_s - self._lost_s >= GRACE_S:
            return Connection.AWAY
        return Connection.LOST if self._connected_once else Connection.CONNECTING

    def next_task(self, now_s: float, *, message: bool, engine_up: bool) -> Task:
        """The feed's next task. `message`: True if one was received. `engine_up`: True if the engine is known to be up,
        regardless of the connection."""
        if self._restart_due:
            self._restart_due = False
            return Task.RESTART
        if self._reconnect_due:
            self._reconnect_due = self._probe_due = False
            return Task.RECONNECT
        if message:
            return Task.TAKE
        silent = now_s - self._quiet_since_s >= self._silence_s
        if self._probe_due or (silent and (self._connections > 0 or engine_up)):
            self._probe_due = False
            return Task.PROBE
        return Task.WAIT

    def finish(self, task: Task, now_s: float) -> None:
        """Finish the task. TAKE, RECONNECT and PROBE restart the silence timer."""
        if task in (Task.WAIT, Task.RESTART):
            return
        if task is not Task.PROBE:
            self._silence.reset()
        self._silence_s = self._silence.next_s()
        self._quiet_since_s = now_s
