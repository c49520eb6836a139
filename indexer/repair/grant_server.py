"""Answers publishers' requests to send a large snapshot, for the partitions that this replica owns."""

import logging
from collections.abc import Callable, Sequence
from time import monotonic, time_ns

import anyio
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvatlas.bus.connection import unsubscribe
from kvatlas.bus.control import GrantRequest
from kvatlas.bus.subjects import ALL_GRANTS, is_inbox, partition_of
from kvatlas.errors import InvalidValue
from kvatlas.incarnation import check_incarnation
from kvatlas.runtime.rate_limited_log import RateLimitedLog
from kvatlas.runtime.sender_quota import FairShare
from kvatlas_indexer.counters import IndexerCounters
from kvatlas_indexer.ownership.owned_partitions import OwnedPartitions
from kvatlas_indexer.repair.grants import GrantBudget

log = logging.getLogger("kvatlas.indexer")


class GrantServer:
    def __init__(
        self,
        client: Client,
        owned: OwnedPartitions,
        grants: GrantBudget,
        counters: IndexerCounters,
        partitions: Sequence[int],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        """`partitions`: every partition count that publishers may use; the first one is that of the index."""
        self._partitions = partitions
        self._client = client
        self._owned = owned
        self._grants = grants
        self._counters = counters
        self._clock = clock
        self._log = RateLimitedLog(log)
        self._share = FairShare()

    async def run(self) -> None:
        """Answer until cancelled."""
        subscription = await self._client.subscribe(ALL_GRANTS, cb=self._on_request)
        try:
            await anyio.sleep_forever()
        finally:
            await unsubscribe(subscription, self._client)

    async def _on_request(self, msg: Msg) -> None:
        _, _, partition, worker = msg.subject.split(".")
        if not is_inbox(msg.reply) or not partition.isdecimal() or not self._may_own(int(partition), worker):
            return
        if not self._share.admit(msg.subject, self._clock()):
            self._counters.grants_excess += 1
            return
        try:
            request = GrantRequest.unpack(msg.data)
            if worker != request.worker_id:
                raise InvalidValue(f"it names worker {request.worker_id}; expected {worker}")
            right = [partition_of(request.worker_id, count) for count in self._partitions]
            if int(partition) not in right:
                raise InvalidValue(f"worker {request.worker_id} belongs to partition {right[0]}; expected {partition}")
            if not self._owned.owns(request.worker_id):
                return
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

    def _may_own(self, partition: int, worker_id: str) -> bool:
        """True if this replica may own the worker of a request. This is checked before the request, which anyone may have sent,
        is read."""
        if len(self._partitions) == 1:
            return partition in self._owned.partitions
        return self._owned.owns(worker_id)
