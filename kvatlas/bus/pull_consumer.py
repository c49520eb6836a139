"""An ephemeral consumer of the event stream, and the hot path from NATS' callback into its queue, which needs no task and no
wait per message.

A consumer is never repaired: if the stream, the connection or a message is lost, a new consumer starts from the last applied
position. The fence drops messages that arrive twice.
"""

import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from time import monotonic
from typing import Protocol

import anyio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from kvatlas.bus.connection import unsubscribe
from kvatlas.bus.partition_batch import Position
from kvatlas.bus.pull_protocol import PullStatus, PullWindow, last_consumer_seq, messages_returned, pull_status
from kvatlas.bus.queue import PartitionQueue
from kvatlas.bus.stream import stream_info
from kvatlas.bus.subjects import STREAM
from kvatlas.bus.wire import RawMessage
from kvatlas.errors import KvatlasError

PULL_MESSAGES = 512
PULL_BYTES = 704 * 1024
"""More than the size of the largest message with its subject and headers, because such a message would otherwise never be
delivered."""
PULL_EXPIRES_S = 30
IDLE_HEARTBEAT_S = 2
SILENCE_S = 5.0
"""A consumer is gone if it has sent nothing for this long while requests were outstanding."""
INACTIVE_THRESHOLD_S = 30
WATCH_S = 0.5
CLOSE_DEADLINE_S = 1.0

log = logging.getLogger("kvatlas.bus")

_REQUEST = json.dumps(
    {
        "batch": PULL_MESSAGES,
        "max_bytes": PULL_BYTES,
        "expires": PULL_EXPIRES_S * 1_000_000_000,
        "idle_heartbeat": IDLE_HEARTBEAT_S * 1_000_000_000,
    }
).encode()


class ReadCounters(Protocol):
    """The counters that a consumer adds to."""

    messages_read: int


class PullConsumer:
    """One consumer of the stream and its queue. Keeps two pull requests outstanding as long as the queue has room."""

    def __init__(
        self,
        name: str,
        start: Position,
        pending: int,
        *,
        partition: int,
        client: Client,
        admit: Callable[[str, bytes, Mapping[str, str] | None], RawMessage | None],
        on_queued: Callable[[], None],
        counters: ReadCounters,
    ) -> None:
        """`start`: the position before the first message. `pending`: the number of messages in the stream after it.
        `partition`: the partition that it reads; EVERY_PARTITION: all. `admit` is given each message's subject and payload, and
        returns None if the message must not be applied. `on_queued` is called when a message enters an empty queue."""
        self.name = name
        self.inbox = client.new_inbox()
        self.queue = PartitionQueue(partition, start, pending, on_room=self.pull)
        self._client = client
        self._reconnects = client.stats["reconnects"]
        self._admit = admit
        self._on_queued = on_queued
        self._counters = counters
        self._window = PullWindow(PULL_MESSAGES)
        self._next_subject = f"$JS.API.CONSUMER.MSG.NEXT.{STREAM}.{name}"
        self._heard_s = monotonic()
        self._starved = False

    @property
    def silent(self) -> bool:
        """True if the server has sent nothing for SILENCE_S while requests were outstanding."""
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
        """NATS' callback. Never raises: a poison message is counted, and if the consumer has failed, the queue fails too."""
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
        queue = self.queue
        message = self._admit(msg.subject, data, msg.headers)
        headers = msg.headers if msg.headers and "traceparent" in msg.headers else None
        was_empty = not queue
        queue.add(message, len(data), msg.reply, headers)
        if was_empty:  # otherwise the applier has not got to this queue yet
            self._on_queued()

    async def wait_until_lost(self) -> str:
        """Wait until the consumer is unusable; return why."""
        while True:
            with anyio.move_on_after(WATCH_S):
                await self.queue.failed.wait()
                return self.queue.failure
            if self._client.stats["reconnects"] != self._reconnects or not self._client.is_connected:
                return "NATS connection lost"
            if self.silent:
                return f"consumer silent for {SILENCE_S:g} s"


@asynccontextmanager
async def open_pull_consumer(
    client: Client, name: str, filters: Sequence[str], start: Position, make: Callable[[int], PullConsumer]
) -> AsyncIterator[PullConsumer]:
    """Create a consumer of everything after `start`. `make` builds it from the number of pending messages; it has not pulled
    anything yet. Exiting the context deletes the consumer. Raises nats errors, or KvatlasError if `start` belongs to a
    different stream."""
    info = await client.jetstream().add_consumer(
        STREAM,
        ConsumerConfig(
            name=name,
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=start.seq + 1,
            ack_policy=AckPolicy.NONE,
            filter_subject=filters[0] if len(filters) == 1 else None,
            filter_subjects=list(filters) if len(filters) > 1 else None,
            inactive_threshold=INACTIVE_THRESHOLD_S,
            mem_storage=True,
            num_replicas=1,
        ),
    )
    consumer = make(info.num_pending or 0)
    subscription: Subscription | None = None
    try:
        if (await stream_info(client)).creation_us != start.creation_us:
            raise KvatlasError("the stream was created again")
        subscription = await client.subscribe(consumer.inbox, cb=consumer.on_message)
        yield consumer
    finally:
        await _close(client, name, subscription)


async def _close(client: Client, consumer: str, subscription: Subscription | None) -> None:
    """Delete the consumer. If that fails, the server deletes it after the inactivity threshold."""
    try:
        if subscription is not None:
            await unsubscribe(subscription, client)
        with anyio.move_on_after(CLOSE_DEADLINE_S, shield=True):
            if client.is_connected:
                await client.publish(f"$JS.API.CONSUMER.DELETE.{STREAM}.{consumer}", b"")
    except NatsError as error:
        log.debug("consumer %s was not deleted (%s); NATS deletes it when it is inactive", consumer, error)
