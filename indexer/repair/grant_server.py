"""Answers the requests of publishers to send a large snapshot, for the owned partitions."""

import logging
from collections.abc import Callable
from time import monotonic, time_ns

import anyio
from nats.aio.client import Client
from nats.aio.msg import Msg

from indexer.counters import IndexerCounters
from indexer.ownership.owned_partitions import OwnedPartitions
from indexer.repair.grants import GrantBudget
from kvatlas.bus.connection import unsubscribe
from kvatlas.bus.control import GrantRequest
from kvatlas.bus.subjects import ALL_GRANTS, ALL_GRANTS_BEFORE, is_inbox
from kvatlas.errors import InvalidValue
from kvatlas.incarnation import check_incarnation
from kvatlas.runtime.rate_limited_log import RateLimitedLog

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
        self._log = RateLimitedLog(log)

    async def run(self) -> None:
        """Answer until cancelled."""
        subjects = (ALL_GRANTS, ALL_GRANTS_BEFORE)
        subscriptions = [await self._client.subscribe(subject, cb=self._on_request) for subject in subjects]
        try:
            await anyio.sleep_forever()
        finally:
            for subscription in subscriptions:
                await unsubscribe(subscription, self._client)

    async def _on_request(self, msg: Msg) -> None:
        _, _, partition, *worker = msg.subject.split(".")
        if not is_inbox(msg.reply) or not partition.isdecimal() or int(partition) not in self._owned.partitions:
            return
        try:
            request = GrantRequest.unpack(msg.data)
            if worker and worker != [request.worker_id]:
                raise InvalidValue(f"it names worker {request.worker_id}; expected {worker[0]}")
            if (right := self._owned.partition_of(request.worker_id)) != int(partition):
                raise InvalidValue(f"worker {request.worker_id} is of partition {right}; expected {partition}")
            check_incarnation(request.incarnation, time_ns() // 1_000)
        except InvalidValue as error:
            self._counters.grants_bad += 1
            self._log.report(msg.subject, f"grant request on {msg.subject} ignored: {error}")
            return
        reply = self._grants.answer(request, self._clock())
        if reply.granted:
            self._counters.grants_given += 1
        else:
            self._counters.grants_refused += 1
        await self._client.publish(msg.reply, reply.pack())
