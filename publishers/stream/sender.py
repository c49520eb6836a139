"""Sends one worker's outbox to the stream and hears the acknowledgements (thin: the rules are in `publishers.stream.outbox`).

One inbox subscription a worker; each message's reply subject ends in its round and seq, so no future is kept for it.
"""

import logging
from collections.abc import Callable
from time import monotonic

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import ConnectionClosedError, ConnectionDrainingError, MaxPayloadError, OutboundBufferLimitError

from kvatlas.bus.subscription import unsubscribe
from kvatlas.runtime.wakeup import Waking
from publishers.counters import PublisherCounters
from publishers.stream.outbox import Outbox
from publishers.stream.puback import Refusal, Refused, read_ack

ACK_TIMEOUT_S = 2.0
LONGEST_ACK_TIMEOUT_S = 30.0
FIRST_BACK_OFF_S = 0.1
LONGEST_BACK_OFF_S = 5.0
AWAY_POLL_S = 0.05

_COUNTER = {
    Refusal.NO_STREAM: "refused_no_stream",
    Refusal.NO_SPACE: "refused_no_space",
    Refusal.TOO_LARGE: "refused_too_large",
    Refusal.BUSY: "refused_busy",
    Refusal.OTHER: "refused_other",
}

log = logging.getLogger("kvatlas.publisher")


class Sender:
    """`run` until cancelled; `wake` after something was put in the outbox.

    A refused or overdue message and a lost connection make it go back to the first unacknowledged one, with back-off.
    """

    def __init__(
        self,
        client: Client,
        outbox: Outbox,
        subject: str,
        counters: PublisherCounters,
        *,
        on_progress: Callable[[], None] = lambda: None,
        ack_timeout_s: float = ACK_TIMEOUT_S,
    ) -> None:
        """`on_progress` is called when the outbox has become empty, and when trouble ends."""
        self._client = client
        self._outbox = outbox
        self._subject = subject
        self._counters = counters
        self._on_progress = on_progress
        self._waking = Waking()
        self._inbox = client.new_inbox()
        self._subscription: Subscription | None = None
        self._first_ack_timeout_s = self._ack_timeout_s = ack_timeout_s
        self._back_off_s = FIRST_BACK_OFF_S
        self._not_before_s = 0.0
        self._progress_s = 0.0
        self._connections = self._reconnects()
        self._away = False
        self._troubled = False
        """something failed since the last acknowledgement"""
        self._refill = outbox.limits.window_messages // 2
        self.trouble: str | None = None
        """why nothing gets through now; None while all is well"""

    @property
    def well(self) -> bool:
        """Connected, and the last that was heard of the stream was good."""
        return self._client.is_connected and self.trouble is None

    def wake(self) -> None:
        self._waking.wake()

    async def start(self) -> None:
        """Listen for acknowledgements. Raises nats errors if the connection is closed."""
        self._subscription = await self._client.subscribe(f"{self._inbox}.*.*", cb=self._on_ack)

    async def run(self) -> None:
        """Send until cancelled."""
        while True:
            await self._waking.wait(await self._step())

    async def stop(self) -> None:
        """Listen no longer."""
        if self._subscription is not None:
            await unsubscribe(self._subscription, self._client)
        self._subscription = None

    # ---------------------------------------------------------------- sending

    async def _step(self) -> float:
        """Send what may be sent now; seconds until there is something to do again, unless woken."""
        if not self._client.is_connected:
            if not self._away:
                self._away = True
                self._counters.disconnects += 1
                self._in_trouble("NATS is away")
            return AWAY_POLL_S
        if self._away or self._connections != self._reconnects():
            self._away = False
            self._connections = self._reconnects()
            self._not_before_s = 0.0
            self._go_back()
            self._in_trouble(None)
            self._on_progress()
        now = monotonic()
        if now < self._not_before_s:
            return self._not_before_s - now
        if self._outbox.in_flight:
            if now - self._progress_s >= self._ack_timeout_s:
                self._counters.ack_timeouts += 1
                self._in_trouble(f"no acknowledgement in {self._ack_timeout_s:g} s")
                self._ack_timeout_s = min(2 * self._ack_timeout_s, LONGEST_ACK_TIMEOUT_S)
                self._go_back()
        else:
            self._progress_s = now
        await self._send()
        return max(0.0, self._progress_s + self._ack_timeout_s - monotonic()) if self._outbox.in_flight else 60.0

    async def _send(self) -> None:
        take, publish, counters = self._outbox.take, self._client.publish, self._counters
        try:
            while (outgoing := take()) is not None:
                reply = f"{self._inbox}.{outgoing.round}.{outgoing.seq}"
                headers = dict(outgoing.headers) if outgoing.headers else None
                await publish(self._subject, outgoing.payload, reply=reply, headers=headers)
                counters.sends += 1
                counters.sent_bytes += len(outgoing.payload)
        except MaxPayloadError:
            self._refused(Refused(Refusal.TOO_LARGE, f"the server takes {self._client.max_payload} bytes"))
        except (OutboundBufferLimitError, ConnectionClosedError, ConnectionDrainingError):
            self._go_back()  # the next step sees the connection gone, or room again

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
                self._refused(answer)
            return
        outbox = self._outbox
        if released := outbox.acked(int(round_), int(seq), answer):
            self._counters.acks += released
            self._progress_s = monotonic()
            if self._troubled:
                self._troubled = False
                self._ack_timeout_s = self._first_ack_timeout_s
                self._back_off_s = FIRST_BACK_OFF_S
                self._in_trouble(None)
                self._on_progress()
            elif outbox.empty:
                self._on_progress()
            if outbox.unsent and outbox.in_flight <= self._refill:  # half a window at once: fewer wake-ups
                self._waking.wake()
        if outbox.misplaced:  # the stream was made anew, or a new leader of it took them in another order
            self._go_back()
            self._waking.wake()

    def _refused(self, refused: Refused) -> None:
        counter = _COUNTER[refused.refusal]
        setattr(self._counters, counter, getattr(self._counters, counter) + 1)
        self._in_trouble(str(refused))
        self._not_before_s = monotonic() + self._back_off_s
        self._back_off_s = min(2 * self._back_off_s, LONGEST_BACK_OFF_S)
        self._go_back()
        self._waking.wake()

    def _in_trouble(self, trouble: str | None) -> None:
        """Say it once when it begins or changes, and once when it ends."""
        self._troubled = self._troubled or trouble is not None
        if trouble is not None and trouble != self.trouble:
            log.warning("worker %s: messages wait: %s", self._outbox.worker_id, trouble)
        elif trouble is None and self.trouble is not None:
            log.info("worker %s: messages go on", self._outbox.worker_id)
        self.trouble = trouble

    def _reconnects(self) -> int:
        return int(self._client.stats["reconnects"])
