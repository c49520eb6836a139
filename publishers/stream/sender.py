"""Sends one worker's outbox to the stream and receives the acknowledgements (thin: the rules are in `stream.outbox`).

There is one inbox subscription per worker. Each message's reply subject ends in its round and seq, so it needs no future.
"""

import logging
from collections.abc import Callable
from time import monotonic

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import ConnectionClosedError, ConnectionDrainingError, MaxPayloadError, OutboundBufferLimitError

from kvatlas.bus.connection import unsubscribe
from kvatlas.bus.subjects import FLEET
from kvatlas.runtime.backoff import Backoff
from kvatlas.runtime.wakeup import Wakeup
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.stream.message_split import SMALLEST_MESSAGE_BYTES
from kvatlas_publishers.stream.outbox import Outbox
from kvatlas_publishers.stream.puback import NegativeAck, Refusal, read_ack

ACK_TIMEOUT_S = 2.0
LONGEST_ACK_TIMEOUT_S = 30.0
FIRST_BACK_OFF_S = 0.1
LONGEST_BACK_OFF_S = 5.0
DISCONNECTED_POLL_S = 0.05

_COUNTER = {
    Refusal.NO_STREAM: "refused_no_stream",
    Refusal.NO_SPACE: "refused_no_space",
    Refusal.TOO_LARGE: "refused_too_large",
    Refusal.BUSY: "refused_busy",
    Refusal.OTHER: "refused_other",
}

log = logging.getLogger("kvatlas.publisher")


class Sender:
    """Call `run` (until cancelled), and `wake` after something was put in the outbox.

    After a refused or overdue message or a lost connection, it goes back to the first unacknowledged message, with back-off.
    """

    def __init__(
        self,
        client: Client,
        outbox: Outbox,
        subject: str,
        counters: PublisherCounters,
        *,
        fleet_id: str | None = None,
        on_progress: Callable[[], None] = lambda: None,
        on_too_large: Callable[[int], bool] = lambda _: False,
        ack_timeout_s: float = ACK_TIMEOUT_S,
    ) -> None:
        """`fleet_id`: sent with each message; indexers of other fleets refuse it. `on_progress`: called when the outbox becomes
        empty, and when trouble ends. `on_too_large(seq)`: this message is larger than the stream allows; returns True if
        smaller ones replace it."""
        self._client = client
        self._outbox = outbox
        self._subject = subject
        self._counters = counters
        self._fleet = {} if fleet_id is None else {FLEET: fleet_id}
        self._on_progress = on_progress
        self._on_too_large = on_too_large
        self._wakeup = Wakeup()
        self._inbox = client.new_inbox()
        self._subscription: Subscription | None = None
        self._ack_timeouts = Backoff(ack_timeout_s, LONGEST_ACK_TIMEOUT_S)
        self._ack_timeout_s = self._ack_timeouts.next_s()
        self._backoff = Backoff(FIRST_BACK_OFF_S, LONGEST_BACK_OFF_S)
        self._not_before_s = 0.0
        self._progress_s = 0.0
        self._connections = self._reconnects()
        self._disconnected = False
        self._failed = False
        """True if something failed since the last acknowledgement."""
        self._refill = outbox.limits.window_messages // 2
        self.trouble: str | None = None
        """Why publishing is blocked; None while it is not."""
        self._trouble_since_s = 0.0
        self.refused_without_stream = False
        """True if the trouble is that this NATS has no event stream."""

    @property
    def ready(self) -> bool:
        """True if connected and the stream's last answer was good."""
        return self._client.is_connected and self.trouble is None

    @property
    def blocked_s(self) -> float:
        """Seconds that publishing has been blocked; 0 while it is not."""
        return 0.0 if self.trouble is None else monotonic() - self._trouble_since_s

    def wake(self) -> None:
        self._wakeup.wake()

    async def start(self) -> None:
        """Subscribe to acknowledgements. Raises nats errors if the connection is closed."""
        self._subscription = await self._client.subscribe(f"{self._inbox}.*.*", cb=self._on_ack)

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._wakeup.wait(await self._step())

    async def stop(self) -> None:
        if self._subscription is not None:
            await unsubscribe(self._subscription, self._client)
        self._subscription = None

    # ---------------------------------------------------------------- sending

    async def _step(self) -> float:
        """Send everything allowed now. Returns the seconds until the next step is needed, unless woken."""
        if not self._client.is_connected:
            if not self._disconnected:
                self._disconnected = True
                self._counters.disconnects += 1
                self._set_trouble("NATS is not connected")
            return DISCONNECTED_POLL_S
        if self._disconnected or self._connections != self._reconnects():
            self._disconnected = False
            self._connections = self._reconnects()
            self._not_before_s = 0.0
            self._go_back()
            self._set_trouble(None)
            self._on_progress()
        now = monotonic()
        if now < self._not_before_s:
            return self._not_before_s - now
        if self._outbox.in_flight:
            if now - self._progress_s >= self._ack_timeout_s:
                self._counters.ack_timeouts += 1
                self._set_trouble(f"no acknowledgement within {self._ack_timeout_s:g} s")
                self._ack_timeout_s = self._ack_timeouts.next_s()
                self._go_back()
        else:
            self._progress_s = now
        await self._send()
        return max(0.0, self._progress_s + self._ack_timeout_s - monotonic()) if self._outbox.in_flight else 60.0

    async def _send(self) -> None:
        take, publish, counters = self._outbox.take, self._client.publish, self._counters
        seq = 0
        try:
            while (outgoing := take()) is not None:
                seq = outgoing.seq
                reply = f"{self._inbox}.{outgoing.round}.{outgoing.seq}"
                headers = {**self._fleet, **(outgoing.headers or {})}
                await publish(self._subject, outgoing.payload, reply=reply, headers=headers or None)
                counters.sends += 1
                counters.sent_bytes += len(outgoing.payload)
        except MaxPayloadError:
            self._refuse(seq, NegativeAck(Refusal.TOO_LARGE, f"the server takes {self._client.max_payload} bytes"))
        except (OutboundBufferLimitError, ConnectionClosedError, ConnectionDrainingError):
            self._go_back()  # the next step finds the connection gone, or room again

    def _go_back(self) -> None:
        self._counters.resends += self._outbox.go_back()
        self._progress_s = monotonic()

    # ---------------------------------------------------------------- acknowledgements

    async def _on_ack(self, msg: Msg) -> None:
        _, round_, seq = msg.subject.rsplit(".", 2)
        data = msg.data
        answer = read_ack(data, None if data else msg.headers)
        if not isinstance(answer, int):
            if int(round_) == self._outbox.round:
                self._refuse(int(seq), answer)
            return
        outbox = self._outbox
        if released := outbox.acknowledge(int(round_), int(seq), answer):
            self._counters.acks += released
            self._progress_s = monotonic()
            if self._failed:
                self._failed = False
                self._ack_timeouts.reset()
                self._ack_timeout_s = self._ack_timeouts.next_s()
                self._backoff.reset()
                self._set_trouble(None)
                self._on_progress()
            elif outbox.empty:
                self._on_progress()
            if outbox.unsent and outbox.in_flight <= self._refill:  # refill half a window at once, for fewer wake-ups
                self._wakeup.wake()
        if outbox.misplaced:  # the stream was recreated, or its new leader stored them in another order
            self._go_back()
            self._wakeup.wake()

    def _refuse(self, seq: int, refused: NegativeAck) -> None:
        """Handle a refused message: send all unacknowledged ones again after the back-off, or smaller ones if it was too
        large."""
        counter = _COUNTER[refused.refusal]
        setattr(self._counters, counter, getattr(self._counters, counter) + 1)
        if refused.refusal is Refusal.TOO_LARGE:
            if self._on_too_large(seq):
                largest_bytes = self._outbox.limits.message_bytes
                log.info("worker %s: %s; sending at most %d bytes", self._outbox.worker_id, refused, largest_bytes)
                return
            self._set_trouble(f"{refused}; expected its max_msg_size to be {2 * SMALLEST_MESSAGE_BYTES} or more")
        else:
            self._set_trouble(str(refused))
            self.refused_without_stream = refused.refusal is Refusal.NO_STREAM
        self._not_before_s = monotonic() + self._backoff.next_s()
        self._go_back()
        self._wakeup.wake()

    def _set_trouble(self, trouble: str | None) -> None:
        """Log once when publishing is blocked or the reason changes, and once when it resumes."""
        self._failed = self._failed or trouble is not None
        if trouble is not None and trouble != self.trouble:
            if self.trouble is None:
                self._trouble_since_s = monotonic()
            log.warning("worker %s: publishing blocked: %s", self._outbox.worker_id, trouble)
        elif trouble is None and self.trouble is not None:
            blocked_s = monotonic() - self._trouble_since_s
            log.info("worker %s: publishing resumed after %.1f s", self._outbox.worker_id, blocked_s)
        self.trouble = trouble
        self.refused_without_stream = False

    def _reconnects(self) -> int:
        return int(self._client.stats["reconnects"])
