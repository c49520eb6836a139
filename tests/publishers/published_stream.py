"""The stream's messages, read through the index's own fence; and a worker to publish."""

from collections import Counter
from dataclasses import dataclass, field

import anyio
from nats.aio.client import Client

from kvatlas.bus.control import ControlReply, ControlRequest
from kvatlas.bus.partition_batch import PartitionBatch
from kvatlas.bus.subjects import ALL_EVENTS, STREAM, control_subject, partition_of
from kvatlas.bus.wire import decode, decode_raw
from kvatlas.events import Message
from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.settings import PublisherSettings

PARTITIONS = 64
SETTINGS = PublisherSettings(worker_id="w", model_id="model", block_size=16, partitions=PARTITIONS)
SCOPE = Scope("model", "model")


@dataclass
class PublishedStream:
    """Everything in the stream, in order, folded into a memory index."""

    index: MemoryIndex = field(default_factory=lambda: MemoryIndex(PARTITIONS))
    messages: list[Message] = field(default_factory=list)
    headers: list[dict[str, str] | None] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)

    async def residencies(self, worker_id: str) -> int:
        return len([one async for one in self.index.snapshot(worker_id)])


async def read_stream(client: Client) -> PublishedStream:
    published = PublishedStream()
    jetstream = client.jetstream()
    left = (await jetstream.stream_info(STREAM)).state.messages
    if not left:
        return published
    subscription = await jetstream.subscribe(ALL_EVENTS, ordered_consumer=True)
    for _ in range(left):
        msg = await subscription.next_msg(timeout=60)
        message = decode(msg.data)
        published.messages.append(message)
        published.headers.append(msg.headers)
        batch = PartitionBatch(partition_of(message.worker_id, PARTITIONS), [decode_raw(msg.data)])
        applied = await published.index.apply(0, [batch])
        for outcome in ("applied", "duplicates", "stale", "gaps", "refused", "failed_checks"):
            published.outcomes[outcome] += getattr(applied, outcome)
    await subscription.unsubscribe()
    return published


async def flushed(publisher: Publisher, deadline_s: float = 60) -> None:
    with anyio.fail_after(deadline_s):
        await publisher.flush()


def tokens(count: int, first: int = 0) -> list[int]:
    return list(range(first, first + count))


async def ask(client: Client, request: ControlRequest) -> ControlReply:
    return ControlReply.unpack((await client.request(control_subject("w"), request.pack(), timeout=60)).data)
