"""Folds recorded batches into the ledger and publishes the change: immediately while nothing is in flight, otherwise together
with the batches of the next 5 ms."""

import logging
from collections.abc import Callable
from time import monotonic, time_ns

import anyio

from kvatlas.errors import DATA_ERRORS
from kvatlas.events import IndexEvent
from kvatlas.runtime.wakeup import Wakeup
from kvatlas.telemetry import flush_span, inject_headers
from kvatlas_publishers.engine_events import EngineBatch
from kvatlas_publishers.parts import PublisherParts
from kvatlas_publishers.stream.message_split import block_count

LINGER_S = 0.005
LINGER_EVENTS = 2048
"""If this many engine events are pending, they are folded without lingering."""


class FoldLoop:
    """Call `record` for each batch, `run` until cancelled, and `on_progress` when the stream has acknowledged messages."""

    def __init__(self, parts: PublisherParts, on_published: Callable[[], None]) -> None:
        """`on_published`: called when the outbox has new messages."""
        self._parts = parts
        self._changelog = parts.changelog
        self._on_published = on_published
        self._wakeup = Wakeup()
        self._progress = anyio.Event()
        self._first_pending_s = 0.0
        self._first_pending_ns = 0
        self._folded_events = 0

    def record(self, batch: EngineBatch) -> None:
        """Record a batch for the next fold."""
        before = self._changelog.pending_events
        self._changelog.record(batch)
        if not before:
            self._first_pending_s = monotonic()
            self._first_pending_ns = time_ns()
        if not before or before < LINGER_EVENTS <= self._changelog.pending_events:
            self._wakeup.wake()

    async def run(self, settle: Callable[[], None]) -> None:
        """Call `settle` when a fold is due, and publish checkpoints when they are due; until cancelled."""
        changelog = self._changelog
        while True:
            await self._wakeup.wait(changelog.checkpoint_in(monotonic()))
            if changelog.pending_events:
                while changelog.outbox.in_flight and changelog.pending_events < LINGER_EVENTS:
                    left_s = self._first_pending_s + LINGER_S - monotonic()
                    if left_s <= 0 or not await self._wakeup.wait(left_s):
                        break
                settle()
            if changelog.checkpoint_in(monotonic()) == 0:
                self.checkpoint()

    def fold(self) -> list[IndexEvent] | None:
        """Fold pending events into the ledger. Returns the change, for `publish`; None if they can't be folded, so that all
        known blocks must be dropped."""
        self._folded_events = pending = self._changelog.pending_events
        try:
            return self._changelog.fold()
        except DATA_ERRORS as error:
            self._parts.counters.folds_failed += 1
            line = f"{pending} engine events could not be applied ({type(error).__name__} {error}); dropping all known blocks"
            self._parts.log.report("fold", line, logging.ERROR)
            return None

    def publish(self, events: list[IndexEvent]) -> None:
        """Publish the change from the last `fold`, in one span."""
        if self._changelog.incarnation_due is not None:
            self._parts.due.wake()
        if events:
            with flush_span(
                self._parts.worker_id,
                incarnation=self._changelog.outbox.incarnation,
                messages=1,
                events=len(events),
                blocks=block_count(events),
                started_ns=self._first_pending_ns,
            ):
                if self._changelog.publish(events, time_ns() // 1_000, monotonic(), inject_headers()):
                    self._on_published()
                elif self._changelog.incarnation_due is not None:
                    self._parts.due.wake()
        elif self._folded_events:
            self._signal_progress()  # nothing to publish, so a waiting flush is done

    def checkpoint(self) -> None:
        """Publish a checkpoint now."""
        self._changelog.checkpoint(time_ns() // 1_000)
        self._on_published()

    async def flush(self) -> None:
        """Wait until the stream has acknowledged everything recorded before."""
        while not self._changelog.flushed:
            self._wakeup.wake()
            await self._progress.wait()

    def on_progress(self) -> None:
        """Once the outbox is empty, continue with pending events and with a waiting flush."""
        if self._changelog.outbox.empty:
            if self._changelog.pending_events:
                self._wakeup.wake()
            self._signal_progress()

    def _signal_progress(self) -> None:
        self._progress.set()
        self._progress = anyio.Event()
