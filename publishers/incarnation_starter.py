"""Begins a worker's incarnations when they are due, once the stream accepts messages and a grant allows the
snapshot."""

import logging
from collections.abc import Callable
from functools import partial

import anyio

from kvatlas.bus.control import UNGRANTED_SNAPSHOT_BYTES, GrantRequest
from kvatlas.errors import InvalidValue
from kvatlas.telemetry import inject_headers, snapshot_span
from kvatlas_publishers.heartbeat import time_us
from kvatlas_publishers.parts import PublisherParts
from kvatlas_publishers.stream.changelog import IncarnationReason
from kvatlas_publishers.stream.grants import await_grant
from kvatlas_publishers.stream.sender import Sender

RETRY_S = 1.0

log = logging.getLogger("kvatlas.publisher")


class IncarnationStarter:
    def __init__(self, parts: PublisherParts, sender: Sender, on_begun: Callable[[], None]) -> None:
        self._parts = parts
        self._worker_id = parts.worker_id
        self._changelog = parts.changelog
        self._sender = sender
        self._due = parts.due
        self._on_begun = on_begun

    async def run(self) -> None:
        """Run until cancelled."""
        changelog, sender = self._changelog, self._sender
        while True:
            await self._due.wait()
            while changelog.incarnation_due is not None:
                if not sender.ready or changelog.yielded:
                    await self._due.wait(RETRY_S)
                    continue
                try:
                    incarnation = changelog.next_incarnation(time_us())
                except InvalidValue as error:
                    self._parts.log.report("incarnation", str(error))
                    await anyio.sleep(RETRY_S)
                    continue
                await await_grant(
                    self._parts.client,
                    self._parts.settings.partitions,
                    partial(self._grant_request, incarnation),
                    self._parts.counters,
                    self._parts.rng,
                    self._withdraw,
                )
                reason = changelog.incarnation_due
                if sender.ready and self._begin(incarnation, reason):
                    blocks = changelog.ledger.digest.blocks
                    line = "worker %s: starting incarnation %d with %d blocks (%s)"
                    log.info(line, self._worker_id, incarnation, blocks, reason)
                    sender.wake()
                    self._on_begun()

    def _begin(self, incarnation: int, reason: IncarnationReason) -> bool:
        changelog = self._changelog
        with snapshot_span(
            self._worker_id,
            incarnation=incarnation,
            blocks=changelog.ledger.digest.blocks,
            reason=reason.value,
            request=changelog.snapshot_request,
        ):
            return changelog.begin_incarnation(incarnation, time_us(), inject_headers())

    def _grant_request(self, incarnation: int) -> GrantRequest | None:
        """The request for permission to send a snapshot of the current size; None if it needs no grant."""
        size = self._changelog.snapshot_bytes
        if size <= UNGRANTED_SNAPSHOT_BYTES or self._changelog.yielded:
            return None
        return GrantRequest(worker_id=self._worker_id, incarnation=incarnation, snapshot_bytes=size)

    def _withdraw(self) -> None:
        """Withdraw the old incarnation if a grant is refused: see `Changelog.withdraw`."""
        if self._changelog.withdraw(time_us()):
            log.warning(
                "worker %s: changes were lost when the outbox was full, and no grant for a snapshot yet; "
                "withdrawing all its blocks from the index until then",
                self._worker_id,
            )
            self._sender.wake()
