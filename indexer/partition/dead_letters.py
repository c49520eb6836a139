"""Messages that can't be applied, kept for whoever wants to know why: a bounded stream beside the events."""

import asyncio
import logging
from collections import Counter, deque
from time import monotonic

from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError

from indexer.counters import IndexerCounters
from indexer.partition.admission import Poison, Refused
from kvatlas.bus.subjects import ALL_DEAD, DEAD_STREAM, dead_subject
from kvatlas.bus.wire import MAX_MESSAGE_BYTES

REASON_HEADER = "Kvatlas-Reason"
WHY_HEADER = "Kvatlas-Why"
SUBJECT_HEADER = "Kvatlas-Subject"
QUEUE_LETTERS = 256
LOG_EVERY_S = 10.0

log = logging.getLogger("kvatlas.indexer")


class DeadLetters:
    """Counts, logs (one line a reason in ten seconds) and publishes refused messages. Bounded: what does not fit is
    counted and dropped, the events' reading never waits."""

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
        self._some = asyncio.Event()
        self._logged: dict[Poison, float] = {}
        self._unlogged: Counter[Poison] = Counter()

    def put(self, partition: int, subject: str, payload: bytes, refused: Refused) -> None:
        """One message that is not applied."""
        name = f"poison_{refused.reason}"
        setattr(self._counters, name, getattr(self._counters, name) + 1)
        self._log(subject, refused)
        if len(self._letters) >= QUEUE_LETTERS:
            self._counters.dead_letters_dropped += 1
            return
        headers = {REASON_HEADER: refused.reason.value, WHY_HEADER: _one_line(str(refused)), SUBJECT_HEADER: subject}
        worker = subject.rsplit(".", 1)[-1]
        self._letters.append((dead_subject(partition, worker), headers, payload[:MAX_MESSAGE_BYTES]))
        self._some.set()

    async def run(self) -> None:
        """Publishes what was put; until cancelled."""
        made = False
        while True:
            await self._some.wait()
            self._some.clear()
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
                log.warning("dead letters can't be published: %s", str(error) or type(error).__name__)

    async def _make_stream(self) -> None:
        jetstream = self._client.jetstream()
        try:
            await jetstream.stream_info(DEAD_STREAM)
        except NotFoundError:
            await jetstream.add_stream(self._config)

    def _log(self, subject: str, refused: Refused) -> None:
        now = monotonic()
        if now - self._logged.get(refused.reason, -LOG_EVERY_S) < LOG_EVERY_S:
            self._unlogged[refused.reason] += 1
            return
        self._logged[refused.reason] = now
        more = self._unlogged.pop(refused.reason, 0)
        also = f" (and {more} more since the last line)" if more else ""
        log.warning(
            "message on %s is not applied: %s: %s%s", subject, refused.reason.value, _one_line(str(refused)), also
        )


def _one_line(text: str) -> str:
    printable = "".join(c if " " <= c <= "~" else "?" for c in text)
    return printable if len(printable) <= 300 else printable[:297] + "..."
