"""A snapshot followed by the changes, or the changes from a position on, for one caller at a time.

Each follower has its own JetStream consumer, which fetches more only as the follower reads. So a slow follower costs nothing
here; once the stream no longer has its position, it gets an error. Any replica of the index server can continue where
another one stopped.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from secrets import token_hex
from time import monotonic

from nats.aio.client import Client
from nats.errors import Error as NatsError

from kvatlas.bus.access import NatsAccess
from kvatlas.bus.admission import Admission, PoisonMessage
from kvatlas.bus.connection import connect_nats, reason
from kvatlas.bus.partition_batch import Position
from kvatlas.bus.pull_consumer import PullConsumer, open_pull_consumer
from kvatlas.bus.queue import EVERY_PARTITION
from kvatlas.bus.stream import stream_fleet, stream_info
from kvatlas.bus.subjects import ALL_EVENTS
from kvatlas.bus.wire import INCARNATION, SEQ, WORKER_ID, RawMessage
from kvatlas.errors import KvatlasError, NoIndexYet, Unreachable
from kvatlas.identity import Scope, scope_from_canonical
from kvatlas.index.local_copy.store_copy import start_position
from kvatlas.index.redis.keys import SCOPES, ShardKeys
from kvatlas.index.redis.layout import Layout, layout_errors, read_layout
from kvatlas.index.redis.records import StoredRecord, unpack_incarnation
from kvatlas.index.redis.shard_reader import ShardReader, read_hash
from kvatlas.runtime.wakeup import Wakeup
from kvatlas.store.connection import Store
from kvatlas_router.queries.changes.change import Change, ChangeReader, View, position_text
from kvatlas_router.queries.changes.snapshot import read_snapshot

MOST_FOLLOWERS = 64
MOST_OF_TENANT = 16
"""Maximum number of followers for one tenant, if there are several tenants."""
LOOK_S = 1.0
"""Interval at which the index is checked for workers that it has closed, since the stream does not report them."""


class PositionLost(KvatlasError):
    """The stream no longer has all changes after this position, or is a different stream."""


class TooManyFollowers(KvatlasError):
    """This process already serves as many followers as it can, or as many as the tenant may have."""


@dataclass(slots=True)
class _Counters:
    messages_read: int = 0


@dataclass(slots=True)
class ChangeStreams:
    """All followers of this process. The connection to NATS is opened for the first one."""

    store: Store
    nats: NatsAccess
    followers: int = 0
    _client: Client | None = None
    _connecting: asyncio.Lock = field(default_factory=asyncio.Lock)
    _of_tenant: Counter[str] = field(default_factory=Counter)
    _records: dict[str, StoredRecord] = field(default_factory=dict)
    _records_at_s: float = float("-inf")

    async def follow(
        self, view: View, after: Position | None, *, share: int = MOST_FOLLOWERS
    ) -> AsyncGenerator[Change | None, None]:
        """Yield changes until the stream's consumer is lost, and None about every LOOK_S while there are none. `after=None`:
        start with a snapshot.

        Raises PositionLost, TooManyFollowers, Unreachable or KvatlasError before the first change.
        """
        if self.followers >= MOST_FOLLOWERS:
            raise TooManyFollowers(f"{MOST_FOLLOWERS} followers are served here already")
        if self._of_tenant[view.tenant_id] >= share:
            raise TooManyFollowers(f"{share} followers of this tenant are served here already")
        self.followers += 1
        self._of_tenant[view.tenant_id] += 1
        try:
            client, layout, reader = await self._connect(), await self._layout(), ChangeReader(view)
            shards = [ShardReader(self.store, ShardKeys(k, layout.number)) for k in range(layout.shards)]
            try:
                if after is None:
                    after = await start_position(client, shards, layout)
                    scopes = await self._scopes(view)
                    async for change in read_snapshot(shards, scopes, reader):
                        yield change
                else:
                    await self._check(client, after)
                yield Change("live", {"position": position_text(after)}, after)
                async with aclosing(self._tail(client, layout, shards, reader, after)) as tail:
                    async for found in tail:
                        yield found
            except (NatsError, TimeoutError) as error:
                raise Unreachable(f"NATS: {reason(error)}") from error
        finally:
            self.followers -= 1
            self._of_tenant[view.tenant_id] -= 1
            self._of_tenant += Counter()  # forgets callers without followers

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _tail(
        self, client: Client, layout: Layout, shards: Sequence[ShardReader], reader: ChangeReader, after: Position
    ) -> AsyncGenerator[Change | None, None]:
        wakeup, fleet_id = Wakeup(), await stream_fleet(client)
        admission = Admission(None, layout.partitions, publishers=layout.publishers, fleet_id=fleet_id)
        name = f"kva-follow-{token_hex(6)}"

        def admit(subject: str, payload: bytes, headers: Mapping[str, str] | None) -> RawMessage | None:
            try:
                return admission.admit(subject, payload, headers)
            except PoisonMessage:
                return None

        def make(pending: int) -> PullConsumer:
            return PullConsumer(
                name,
                after,
                pending,
                partition=EVERY_PARTITION,
                client=client,
                admit=admit,
                on_queued=wakeup.wake,
                counters=_Counters(),
            )

        async with open_pull_consumer(client, name, [ALL_EVENTS], after, make) as consumer:
            await consumer.pull()
            lost = asyncio.create_task(consumer.wait_until_lost(), name=name)
            lost.add_done_callback(lambda _: wakeup.wake())
            position = after
            try:
                while not lost.done():
                    for worker_id, incarnation in await self._closed(shards):
                        if reader.gone(worker_id, incarnation):
                            data = {"worker": worker_id, "incarnation": incarnation, "events": [{"kind": "gone"}]}
                            yield Change("change", data, position)
                    if not await wakeup.wait(LOOK_S):
                        yield None
                    while (part := consumer.queue.take(1, 1)) is not None:
                        if part.made_room:
                            await consumer.pull()
                        consumer.queue.record_applied(part.batch)
                        assert part.batch.position is not None
                        position = part.batch.position
                        for raw in part.batch.messages:
                            if events := reader.read(raw):
                                data = {"worker": raw[WORKER_ID], "incarnation": raw[INCARNATION], "seq": raw[SEQ]}
                                yield Change("change", {**data, "events": events}, position)
            finally:
                lost.cancel()

    async def _closed(self, shards: Sequence[ShardReader]) -> list[tuple[str, int]]:
        """(worker, incarnation) for each worker that holds nothing according to the index; read once a second for all
        followers."""
        if monotonic() - self._records_at_s >= LOOK_S:
            self._records_at_s = monotonic()
            self._records = {id: one for shard in shards for id, one in (await shard.records()).items()}
        return [
            (worker_id, unpack_incarnation(record.incarnation))
            for worker_id, record in self._records.items()
            if record.closed and not record.active and not record.loading
        ]

    async def _check(self, client: Client, after: Position) -> None:
        info = await stream_info(client)
        if info.creation_us != after.creation_us or not info.first_seq - 1 <= after.seq <= info.last_seq:
            raise PositionLost("the stream does not have all changes after this position; begin with a snapshot")

    async def _scopes(self, view: View) -> dict[bytes, Scope]:
        texts = await read_hash(self.store, SCOPES)
        scopes = {scope_id: scope_from_canonical(text) for scope_id, text in texts.items()}
        return {scope_id: scope for scope_id, scope in scopes.items() if view.includes(scope)}

    async def _layout(self) -> Layout:
        with layout_errors(self.store):
            if (layout := await read_layout(self.store)) is None:
                raise NoIndexYet(f"{self.store.name}: no index there")
            return layout

    async def _connect(self) -> Client:
        async with self._connecting:
            if self._client is None or self._client.is_closed:
                self._client = await connect_nats(self.nats, name="kvatlas-index-server", wait=False)
            return self._client
