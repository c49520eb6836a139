"""Poison messages, kept for diagnosis in a bounded stream next to the events."""

import logging
from collections import deque

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError

from kvatlas.bus.admission import PoisonMessage
from kvatlas.bus.subjects import ALL_DEAD, DEAD_REASON, DEAD_STREAM, DEAD_SUBJECT, DEAD_WHY, dead_subject
from kvatlas.bus.wire import MAX_MESSAGE_BYTES
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.runtime.wakeup import Wakeup
from kvatlas_indexer.counters import IndexerCounters

QUEUE_LETTERS = 256

log = logging.getLogger("kvatlas.indexer")


class DeadLetters:
    """Counts, logs (with a rate limit per reason) and publishes poison messages. Their number is bounded: messages that do not
    fit are counted and dropped, so that the partitions' readers never wait."""

    def __init__(
        self,
        client: Client,
        counters: IndexerCounters,
        *,
        replicas: int = 1,
        storage: str = "file",
        max_bytes: int = 64 << 20,
    ) -> None:
        self._client = client
        self._counters = counters
        self._config = StreamConfig(
            name=DEAD_STREAM,
            subjects=[ALL_DEAD],
            retention=RetentionPolicy.LIMITS,
            discard=DiscardPolicy.OLD,
            max_bytes=max_bytes,
            max_age=24 * 3600,
            num_replicas=replicas,
            storage=StorageType(storage),
        )
        self._letters: deque[tuple[str, dict[str, str], bytes]] = deque()
        self._wakeup = Wakeup()
        self._log = RateLimitedLog(log)

    def put(self, partition: int, subject: str, payload: bytes, poison: PoisonMessage) -> None:
        """Keep a message that must not be applied."""
        name = f"poison_{poison.reason}"
        setattr(self._counters, name, getattr(self._counters, name) + 1)
        why = _one_line(str(poison))
        self._log.report(poison.reason, f"message on {subject} was not applied ({poison.reason.value}): {why}")
        if len(self._letters) >= QUEUE_LETTERS:
            self._counters.dead_letters_dropped += 1
            return
        headers = {DEAD_REASON: poison.reason.value, DEAD_WHY: why, DEAD_SUBJECT: subject}
        worker = subject.rsplit(".", 1)[-1]
        self._letters.append((dead_subject(partition, worker), headers, payload[:MAX_MESSAGE_BYTES]))
        self._wakeup.wake()

    async def run(self) -> None:
        """Publish the queued messages until cancelled."""
        made = False
        while True:
            await self._wakeup.wait()
            try:
                if not made:
                    await self._make_stream()
                    made = True
                while self._letters:
                    subject, headers, payload = self._letters[0]
                    await self._client.publish(subject, payload, headers=headers)
                    self._letters.popleft()
            except (NatsError, APIError, TimeoutError) as error:
                self._counters.dead_letters_dropped += len(self._letters)
                self._letters.clear()
                log.warning("dead letters could not be published, and are lost: %s", str(error) or type(error).__name__)

    async def _make_stream(self) -> None:
        jetstream = self._client.jetstream()
        try:
            await jetstream.stream_info(DEAD_STREAM)
        except NotFoundError:
            await jetstream.add_stream(self._config)


def _one_line(text: str) -> str:
    printable = "".join(c if " " <= c <= "~" else "?" for c in text)
    return printable if len(printable) <= 300 else printable[:297] + "..."
