"""The stream's messages, read through the index's own fence."""

from collections import Counter
from dataclasses import dataclass, field

from nats.aio.client import Client

from kvatlas.bus.subjects import ALL_EVENTS, STREAM
from kvatlas.bus.wire import decode, decode_raw
from kvatlas.events import Message
from kvatlas.identity import partition_of
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import PartitionBatch

PARTITIONS = 64


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
        msg = await subscription.next_msg(timeout=5)
        message = decode(msg.data)
        published.messages.append(message)
        published.headers.append(msg.headers)
        batch = PartitionBatch(partition_of(message.worker_id, PARTITIONS), [decode_raw(msg.data)])
        applied = await published.index.apply(0, [batch])
        for outcome in ("applied", "duplicates", "stale", "gaps", "refused", "failed_checks"):
            published.outcomes[outcome] += getattr(applied, outcome)
    await subscription.unsubscribe()
    return published
