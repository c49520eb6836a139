"""Answers the requests of publishers to send a large snapshot, for the owned partitions."""

import logging
from collections.abc import Callable
from time import monotonic

import anyio
from nats.aio.client import Client
from nats.aio.msg import Msg

from indexer.counters import IndexerCounters
from indexer.ownership.owned_partitions import OwnedPartitions
from indexer.repair.grants import GrantBudget
from kvatlas.bus.connection import unsubscribe
from kvatlas.bus.control import GrantRequest
from kvatlas.bus.subjects import ALL_GRANTS, is_inbox
from kvatlas.errors import InvalidValue

log = logging.getLogger("kvatlas.indexer")


class GrantServer:
    def __init__(
        self,
        client: Client,
        owned: OwnedPartitions,
        grants: GrantBudget,
        counters: IndexerCounters,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._client = client
        self._owned = owned
        self._grants = grants
        self._counters = counters
        self._clock = clock

    async def run(self) -> None:
        """Answer until cancelled."""
        subscription = await self._client.subscribe(ALL_GRANTS, cb=self._on_request)
        try:
            await anyio.sleep_forever()
        finally:
            await unsubscribe(subscription, self._client)

    async def _on_request(self, msg: Msg) -> None:
        token = msg.subject.rsplit(".", 1)[-1]
        if not is_inbox(msg.reply) or not token.isdigit() or (partition := int(token)) not in self._owned.partitions:
            return
        try:
            request = GrantRequest.unpack(msg.data)
        except InvalidValue as error:
            log.debug("partition %d: invalid grant request: %s", partition, error)
            return
        if (right := self._owned.partition_of(request.worker_id)) != partition:
            log.debug("worker %s: grant request for partition %d; expected %d", request.worker_id, partition, right)
            return
        reply = self._grants.answer(request, self._clock())
        if reply.granted:
            self._counters.grants_given += 1
        else:
            self._counters.grants_refused += 1
        await self._client.publish(msg.reply, reply.pack())
