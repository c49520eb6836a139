"""The hot path of one reading of a partition: from NATS' callback into the feed. No task a message, no wait."""

import json
from time import monotonic

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from indexer.applier import Applier
from indexer.counters import IndexerCounters
from indexer.partition.admission import Admission, Refused
from indexer.partition.dead_letters import DeadLetters
from indexer.partition.pull_protocol import PullStatus, PullWindow, idle_at, messages_returned, pull_status
from indexer.partition.queue import PartitionFeed
from kvatlas.bus.subjects import STREAM

PULL_MESSAGES = 512
PULL_BYTES = 704 * 1024
"""More than the largest message with its subject and headers: a smaller limit would never deliver that one."""
PULL_EXPIRES_S = 30
IDLE_HEARTBEAT_S = 2
SILENCE_S = 5.0
"""A consumer with requests outstanding that says nothing for so long is gone."""

_PULL = json.dumps(
    {
        "batch": PULL_MESSAGES,
        "max_bytes": PULL_BYTES,
        "expires": PULL_EXPIRES_S * 1_000_000_000,
        "idle_heartbeat": IDLE_HEARTBEAT_S * 1_000_000_000,
    }
).encode()


class Reading:
    """Keeps two requests outstanding at one consumer while its feed has room."""

    def __init__(
        self,
        consumer: str,
        feed: PartitionFeed,
        *,
        client: Client,
        admission: Admission,
        applier: Applier,
        dead_letters: DeadLetters,
        counters: IndexerCounters,
    ) -> None:
        self.inbox = client.new_inbox()
        self.feed = feed
        self._client = client
        self._admission = admission
        self._applier = applier
        self._dead_letters = dead_letters
        self._counters = counters
        self._window = PullWindow(PULL_MESSAGES)
        self._next_subject = f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{consumer}"
        self._heard_s = monotonic()
        self._starved = False
        feed.on_room = self.pull

    @property
    def silent(self) -> bool:
        """Has the server said nothing for too long, though it was asked?"""
        return not self._starved and monotonic() - self._heard_s > SILENCE_S

    async def pull(self) -> None:
        """Sends the requests that are due, if the feed has room."""
        try:
            while self._window.due():
                if self.feed.full:
                    self._starved = True
                    return
                if self._starved:
                    self._starved = False
                    self._heard_s = monotonic()
                self._window.sent()
                await self._client.publish(self._next_subject, _PULL, reply=self.inbox)
        except NatsError as error:
            self.feed.fail(str(error))

    async def on_message(self, msg: Msg) -> None:
        """NATS' callback. Raises nothing: what is wrong with a message is counted, with the reading breaks the feed."""
        self._heard_s = monotonic()
        window = self._window
        status = pull_status(msg)
        if status is None:
            window.outstanding -= 1
            self._take(msg)
        elif status is PullStatus.ENDED:
            window.returned(messages_returned(msg))
        elif status is PullStatus.IDLE:
            if (consumer_seq := idle_at(msg)) is not None:
                self.feed.idle_at(consumer_seq)
        else:
            headers = msg.headers or {}
            self.feed.fail(f"NATS says {headers.get('Status')} {headers.get('Description', '')}".rstrip())
            return
        if window.due():
            await self.pull()

    def _take(self, msg: Msg) -> None:
        data = msg.data
        self._counters.messages_read += 1
        self._counters.bytes_read += len(data)
        try:
            raw = self._admission.admit(msg.subject, data)
        except Refused as refused:
            raw = None
            self._dead_letters.put(self.feed.partition, msg.subject, data, refused)
        headers = msg.headers if msg.headers and "traceparent" in msg.headers else None
        feed = self.feed
        was_empty = not feed
        feed.add((raw, len(data), msg.reply, headers))
        if was_empty:  # otherwise the applier has not come to its end yet
            self._applier.wake()
