"""A small publisher for tests: sends one worker's messages and heartbeats over the bus."""

from time import time_ns
from zlib import crc32

import msgpack
from nats.aio.client import Client

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.bus import wire
from kvatlas.bus.subjects import alive_subject, events_subject
from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState, Heartbeat
from kvatlas.identity import Scope
from kvatlas.index.protocol import ResidencyIndex
from tests.kvatlas.index.message_source import Held, MessageSource, contents

PARTITIONS = 64
SCOPE = Scope("model", "tokenizer")


class BusPublisher(MessageSource):
    """Publishes its messages, each acknowledged by the stream; `sent` keeps the payloads."""

    def __init__(self, nats_client: Client, worker_id: str, incarnation: int = 1) -> None:
        super().__init__(worker_id, incarnation)
        self.sent: list[bytes] = []
        self._jetstream = nats_client.jetstream()
        self._client = nats_client
        self._next = 0

    @property
    def subject(self) -> str:
        return events_subject(self.worker_id, PARTITIONS)

    async def send(self, raw: wire.RawMessage) -> None:
        raw[wire.TS_US] = time_ns() // 1_000
        payload = msgpack.packb(raw)
        self.sent.append(payload)
        await self.publish(payload)

    async def publish(self, payload: bytes) -> None:
        """Publish any bytes on the worker's own subject."""
        await self._jetstream.publish(self.subject, payload)

    async def start(self, incarnation: int | None = None) -> None:
        """Start a new incarnation with a snapshot of what is held."""
        await self.send(self.begin(incarnation if incarnation is not None else self.incarnation))

    async def store_more(self, blocks: int = 4) -> None:
        """Publish one message that stores blocks which this worker has never held."""
        await self.send(self._more(blocks))

    async def store_many(self, messages: int) -> None:
        """Publish messages of one new block each, without waiting for acknowledgements."""
        for _ in range(messages):
            await self._client.publish(self.subject, msgpack.packb(self._more(1)))
        await self._client.flush()

    def _more(self, blocks: int) -> wire.RawMessage:
        base = crc32(self.worker_id.encode()) << 32
        first, self._next = base | self._next, self._next + blocks
        return self.store(SCOPE, b"".join((first + i).to_bytes(HASH_BYTES, "little") for i in range(blocks)))

    async def beat(self, acked_seq: int | None = None, incarnation: int | None = None) -> None:
        await self._client.publish(
            alive_subject(self.worker_id), heartbeat(self, acked_seq=acked_seq, incarnation=incarnation).pack()
        )
        await self._client.flush()


def heartbeat(publisher: MessageSource, acked_seq: int | None = None, incarnation: int | None = None) -> Heartbeat:
    return Heartbeat(
        worker_id=publisher.worker_id,
        incarnation=publisher.incarnation if incarnation is None else incarnation,
        acked_seq=publisher.seq if acked_seq is None else acked_seq,
        state=EngineState.UP,
        endpoint=EngineEndpoint(
            id=publisher.worker_id, kind=EngineKind.MOCK, model_id="model", tokenizer_id="tokenizer"
        ),
    )


async def has_applied_all(index: ResidencyIndex, *publishers: MessageSource) -> bool:
    """True if the index has applied the last message of each publisher."""
    for publisher in publishers:
        record = await index.record(publisher.worker_id)
        if record is None or (record.incarnation, record.seq) != (publisher.incarnation, publisher.seq):
            return False
    return True


async def indexed(index: ResidencyIndex, *publishers: MessageSource) -> dict[str, Held]:
    """Each worker's blocks according to the index."""
    return {publisher.worker_id: await contents(index, publisher.worker_id) for publisher in publishers}


def published(*publishers: MessageSource) -> dict[str, Held]:
    """Each worker's blocks according to its publisher's messages."""
    return {publisher.worker_id: publisher.held for publisher in publishers}
