"""The hot path from NATS' callback into a partition's queue: no task and no wait for a message."""

import json
from time import monotonic

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from indexer.applier import Applier
from indexer.counters import IndexerCounters
from indexer.partition.admission import Admission, PoisonMessage
from indexer.partition.dead_letters import DeadLetters
from indexer.partition.pull_protocol import PullStatus, PullWindow, last_consumer_seq, messages_returned, pull_status
from indexer.partition.queue import PartitionQueue
from kvatlas.bus.subjects import STREAM
from kvatlas.index.protocol import Position

PULL_MESSAGES = 512
PULL_BYTES = 704 * 1024
"""More than the largest message with its subject and headers: a smaller limit would never deliver that one."""
PULL_EXPIRES_S = 30
IDLE_HEARTBEAT_S = 2
SILENCE_S = 5.0
"""A consumer that has sent nothing for this long, with requests outstanding, is gone."""

_REQUEST = json.dumps(
    {
        "batch": PULL_MESSAGES,
        "max_bytes": PULL_BYTES,
        "expires": PULL_EXPIRES_S * 1_000_000_000,
        "idle_heartbeat": IDLE_HEARTBEAT_S * 1_000_000_000,
    }
).encode()


class PullConsumer:
    """One consumer of the stream and its queue: keeps two pull requests outstanding while the queue has room."""

    def __init__(
        self,
        name: str,
        start: Position,
        pending: int,
        *,
        client: Client,
        admission: Admission,
        applier: Applier,
        dead_letters: DeadLetters,
        counters: IndexerCounters,
    ) -> None:
        """`start`: the position before the first message. `pending`: messages that the stream has behind it."""
        self.inbox = client.new_inbox()
        self.queue = PartitionQueue(admission.partition, start, pending, on_room=self.pull)
        self._client = client
        self._admission = admission
        self._applier = applier
        self._dead_letters = dead_letters
        self._counters = counters
        self._window = PullWindow(PULL_MESSAGES)
        self._next_subject = f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{name}"
        self._heard_s = monotonic()
        self._starved = False

    @property
    def silent(self) -> bool:
        """Has the server sent nothing for SILENCE_S, with requests outstanding?"""
        return not self._starved and monotonic() - self._heard_s > SILENCE_S

    async def pull(self) -> None:
        """Send the requests that are due, if the queue has room."""
        try:
            while self._window.is_due():
                if self.queue.full:
                    self._starved = True
                    return
                if self._starved:
                    self._starved = False
                    self._heard_s = monotonic()
                self._window.add_request()
                await self._client.publish(self._next_subject, _REQUEST, reply=self.inbox)
        except NatsError as error:
            self.queue.fail(str(error))

    async def on_message(self, msg: Msg) -> None:
        """NATS' callback. Raises nothing: a poison message is counted, a failed consumer fails the queue."""
        self._heard_s = monotonic()
        window = self._window
        status = pull_status(msg)
        if status is None:
            window.outstanding -= 1
            self._enqueue(msg)
        elif status is PullStatus.ENDED:
            window.end_request(messages_returned(msg))
        elif status is PullStatus.IDLE:
            if (consumer_seq := last_consumer_seq(msg)) is not None:
                self.queue.record_idle(consumer_seq)
        else:
            headers = msg.headers or {}
            self.queue.fail(f"NATS ended the pull: {headers.get('Status')} {headers.get('Description', '')}".rstrip())
            return
        if window.is_due():
            await self.pull()

    def _enqueue(self, msg: Msg) -> None:
        data = msg.data
        self._counters.messages_read += 1
        self._counters.bytes_read += len(data)
        queue = self.queue
        try:
            message = self._admission.admit(msg.subject, data)
        except PoisonMessage as poison:
            message = None
            self._dead_letters.put(queue.partition, msg.subject, data, poison)
        headers = msg.headers if msg.headers and "traceparent" in msg.headers else None
        was_empty = not queue
        queue.add(message, len(data), msg.reply, headers)
        if was_empty:  # otherwise the applier still has this queue to come to
            self._applier.wake()
