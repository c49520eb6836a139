"""Copies a shard from the store into a memory index while the store goes on applying messages.

The copy does not show a single moment: a worker's record is read first, and its blocks are read while later messages change
them. The messages after the record must therefore be applied to the copy again, starting at a stream position that the store
had before the record was read. Each message sets the tiers and marks of a block whatever they were before, so blocks that
messages touch end up as in the store, and the others were read correctly. `start_position` gives that position.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from nats.aio.client import Client

from kvatlas.blocks.block_sizes import BlockSizes
from kvatlas.bus.partition_batch import Position
from kvatlas.bus.stream import stream_info
from kvatlas.bus.subjects import STREAM, partition_events
from kvatlas.errors import KvatlasError
from kvatlas.identity import shard_of
from kvatlas.index.holder_entries import number_bytes
from kvatlas.index.memory.mark_table import HolderMarks
from kvatlas.index.memory.shard import MemoryShard, Record
from kvatlas.index.redis.layout import Layout
from kvatlas.index.redis.records import StoredRecord, unpack_incarnation
from kvatlas.index.redis.shard_reader import ShardReader

_NO_MESSAGE = 10037
"""JetStream's error code for a stream that has no message on that subject."""
VALUES_REMEMBERED = 10_000


async def start_position(client: Client, readers: Sequence[ShardReader], layout: Layout) -> Position:
    """The stream position after which a copy that starts now needs messages. Raises KvatlasError if the store's positions
    belong to a different stream, or Unreachable, or a nats error."""
    stored = {
        partition: await readers[shard_of(partition, layout.shards)].position(partition)
        for partition in range(layout.partitions)
    }
    stream = await stream_info(client)
    first = stream.last_seq
    for partition, position in stored.items():
        if position is None:
            continue  # none of its messages has ever been applied: its workers' snapshots are yet to come
        if position.creation_us != stream.creation_us:
            raise KvatlasError("the store's positions belong to another stream; waiting for the indexer")
        filters = partition_events(partition, layout.partitions, layout.publishers)
        if position.seq < first and max([await _last_seq(client, one) for one in filters]) > position.seq:
            first = position.seq
    return Position(stream.creation_us, first)


async def _last_seq(client: Client, filter_subject: str) -> int:
    """The stream seq of the last message that matches the filter; 0 if there is none. Raises KvatlasError or a nats error."""
    asked = json.dumps({"last_by_subj": filter_subject}).encode()
    answer = json.loads((await client.request(f"$JS.API.STREAM.MSG.GET.{STREAM}", asked, timeout=5)).data)
    error = answer.get("error")
    if error is None:
        return int(answer["message"]["seq"])
    if error.get("err_code") == _NO_MESSAGE:
        return 0
    raise KvatlasError(f"stream {STREAM}: {error.get('description')}")


async def copy_shard(reader: ShardReader, shard: MemoryShard, check_size: Callable[[int], None]) -> None:
    """Fill an empty shard. `check_size` is called now and then, first with the number of blocks and then with 0; it may raise.
    Raises Unreachable."""
    records, touched, dropped = await _read_records(reader)
    scope_ids: set[bytes] = set()
    for worker_id, stored in records.items():
        shard.workers[worker_id] = record_of(stored)
        for holder in (stored.active, stored.loading):
            if holder:
                number, used = int.from_bytes(holder, "big"), touched.get(holder, {})
                shard.table.adopt(number, worker_id, used, active=holder == stored.active)
                if holder in dropped:
                    shard.table.marks.marked[number_bytes(number)] = HolderMarks(dropped[holder])
                scope_ids |= used.keys()
    check_size(sum([await reader.count(reader.keys.blocks(scope_id)) for scope_id in scope_ids]))
    known: dict[bytes, bytes] = {}
    for scope_id in sorted(scope_ids):
        async for blocks in reader.scan(reader.keys.blocks(scope_id)):
            shard.table.load(scope_id, blocks, known)
            if len(known) > VALUES_REMEMBERED:
                known.clear()
            check_size(0)
        if shard.table.marks.marked:
            async for fields in reader.scan(reader.keys.marks(scope_id)):
                shard.table.marks.load(scope_id, fields)
                check_size(0)


async def _read_records(
    reader: ShardReader,
) -> tuple[dict[str, StoredRecord], dict[bytes, dict[bytes, BlockSizes]], dict[bytes, int]]:
    """The workers' records, and the scopes and dropped groups of their holders. Everything is read again until no worker's
    holders have changed in the meantime, because the data of a replaced holder may be swept before it is read. Raises
    Unreachable."""
    records = await reader.records()
    while True:
        touched, dropped = await reader.all_touched(), await reader.dropped()
        now = await reader.records()
        if _holders(now) == _holders(records):
            return records, touched, dropped
        records = now


def _holders(records: Mapping[str, StoredRecord]) -> dict[str, tuple[bytes, bytes]]:
    return {worker_id: (stored.active, stored.loading) for worker_id, stored in records.items()}


def record_of(stored: StoredRecord) -> Record:
    """A worker's fence in the form that the memory index uses. It is not bad yet: that depends on the content of the copy."""
    return Record(
        partition=stored.partition,
        incarnation=unpack_incarnation(stored.incarnation),
        seq=stored.seq,
        active=int.from_bytes(stored.active, "big") if stored.active else -1,
        loading=int.from_bytes(stored.loading, "big") if stored.loading else -1,
        closed=bool(stored.closed),
        oom=bool(stored.oom),
        want=(unpack_incarnation(stored.want_incarnation), stored.want_seq),
        chunks=stored.chunks,
    )
