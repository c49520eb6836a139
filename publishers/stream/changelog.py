"""One worker's residency as a change log: engine events go into the ledger, and the ledger's changes into the outbox (pure).

Invariants:
- the messages put in an incarnation's outbox, snapshot first, add up to the ledger's published blocks, unless the outbox is
  full; then a new incarnation is due. An incarnation due for another reason may wait for a grant, and every change is published
  until it begins. If changes were lost, removals may be among them; so as soon as a grant is refused, all blocks of the old
  incarnation are withdrawn;
- a new incarnation is above all earlier ones, the saved one and every requested one.
"""

import random
from collections.abc import Sequence
from enum import StrEnum

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.events import Cleared, IndexEvent, Removed, Stored
from kvatlas.incarnation import next_incarnation
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.engine_events import EngineBatch, EngineEvent
from kvatlas_publishers.ledger.ledger import Ledger
from kvatlas_publishers.stream.checkpoints import CheckpointClock, CheckpointSettings
from kvatlas_publishers.stream.outbox import Headers, Outbox, OutboxLimits


class IncarnationReason(StrEnum):
    """Why a new incarnation is due, as in logs and status."""

    START = "publisher start"
    STARTED_OVER = "all known blocks were dropped"
    OVERFLOW = "the outbox was full"
    TOO_LARGE = "the stream accepts only smaller messages"
    REGROUPED = "the engine's KV cache groups became known"
    REQUESTED = "a snapshot was requested"
    TAKEN_OVER = "the other publisher is silent"


class Changelog:
    """See the module docstring. Nothing is published before the first `require_incarnation`."""

    def __init__(
        self,
        worker_id: str,
        ledger: Ledger,
        counters: PublisherCounters,
        *,
        limits: OutboxLimits | None = None,
        checkpoints: CheckpointSettings | None = None,
        saved_incarnation: int = 0,
        rng: random.Random | None = None,
    ) -> None:
        self.ledger = ledger
        self.outbox = Outbox(worker_id, limits, ledger.settings.granularity)
        self.incarnation_due: IncarnationReason | None = None
        self.begun_us = 0
        """When the incarnation began; 0 before the first."""
        self.begun_because: IncarnationReason | None = None
        self.saved_incarnation = saved_incarnation
        self.yielded = False
        """True while another publisher publishes this worker: no incarnation begins here."""
        self._counters = counters
        self._checkpoints = CheckpointClock(checkpoints or CheckpointSettings())
        self._rng = rng or random.Random()
        self._requested = 0
        self.snapshot_request: Headers = None
        self._pending: list[EngineEvent] = []
        self._sealed = False
        """True if the next change is the last one of this incarnation."""
        self._lost = False
        """True if changes did not fit in the outbox, so the index still has the state before them."""

    # ---------------------------------------------------------------- from the engine

    @property
    def pending_events(self) -> int:
        """Number of engine events recorded but not folded yet."""
        return len(self._pending)

    def record(self, batch: EngineBatch) -> None:
        """Keep a batch's events until `fold`. Batches folded together cost only one change."""
        self._counters.engine_batches += 1
        self._counters.engine_events += len(batch.events)
        self._counters.skipped_events += len(batch.skipped)
        self._pending.extend(batch.events)

    def fold(self) -> list[IndexEvent]:
        """Fold the recorded events into the ledger. Returns the change, which must be published with `publish` before
        the next fold."""
        if not self._pending:
            return []
        events, self._pending = self._pending, []
        return self._unless_regrouped(self.ledger.fold(EngineBatch(events)), IncarnationReason.REGROUPED)

    def forget_adapter(self, adapter: str) -> list[IndexEvent]:
        """See `Ledger.forget_adapter`. Fold pending events first."""
        return self._unless_regrouped(self.ledger.forget_adapter(adapter), IncarnationReason.STARTED_OVER)

    def _unless_regrouped(self, change: list[IndexEvent], reason: IncarnationReason) -> list[IndexEvent]:
        """The ledger's change. If the engine's groups turned out to be different: a Cleared event, then nothing more until the
        new incarnation, whose marks show where the worker can resume."""
        if not self.ledger.take_regrouped():
            return change
        if self.outbox.incarnation or self.incarnation_due is not None:
            self.require_incarnation(reason)
        self._sealed = True
        return [Cleared()]

    def publish(self, events: Sequence[IndexEvent], now_us: int, now_s: float, headers: Headers = None) -> int:
        """Put a change in the outbox. Returns the number of messages; also 0 if the outbox takes nothing more until the due
        incarnation, whose snapshot will include the change."""
        if not events or self.outbox.overflowed or not self.outbox.incarnation:
            return 0
        messages = self.outbox.put(events, self.ledger.uses, now_us, headers)
        if not messages:
            self._overflow()
            return 0
        if self._sealed:
            self.outbox.overflowed, self._sealed = True, False
        self._count(events, messages)
        self._checkpoints.record_messages(messages, now_s)
        return messages

    def start_over(self, now_us: int) -> None:
        """Empty the ledger and require a new incarnation, because the engine's blocks are no longer known. The current one
        publishes the loss at once."""
        self._pending.clear()
        announced = self.ledger.announced_blocks > 0
        self.ledger.empty()
        if announced:
            self.publish([Cleared()], now_us, 0.0)
        if self.outbox.incarnation or self.incarnation_due is not None:
            self.require_incarnation(IncarnationReason.STARTED_OVER)

    def withdraw(self, now_us: int) -> bool:
        """Handle a due snapshot that has to wait. If changes were lost, end the old incarnation with a Cleared event and
        return True."""
        if not self._lost:
            return False
        self._lost = False
        self.outbox.finish(Cleared(), now_us)
        self._count([Cleared()], 1)
        return True

    # ---------------------------------------------------------------- incarnations

    def split_smaller(self, seq: int) -> bool:
        """Handle a message that the stream refused for its size: require a new incarnation with messages of at most half of
        that. Returns False if they can't be any smaller."""
        if not self.outbox.halve_messages(seq):
            return False
        self._lost = False  # no more messages of this incarnation are sent
        self.require_incarnation(IncarnationReason.TOO_LARGE)
        return True

    def require_incarnation(self, reason: IncarnationReason) -> None:
        """Require a new incarnation. The first reason is kept."""
        if self.incarnation_due is None:
            self.incarnation_due = reason

    def request_snapshot(self, above: int, headers: Headers = None) -> bool:
        """Request a snapshot because incarnation `above` is in doubt. Returns False if ours is already above it, so that there
        is nothing to do.

        `headers`: the request's trace context, kept in `snapshot_request` until the snapshot begins. Raises InvalidValue if no
        incarnation is left above it.
        """
        if self.outbox.incarnation > above:
            return False
        next_incarnation(requested=above, now_us=0, rng=self._rng)
        self._requested = max(self._requested, above)
        if self.outbox.incarnation or self.incarnation_due is not None:
            self.require_incarnation(IncarnationReason.REQUESTED)
        self.snapshot_request = headers
        return True

    def next_incarnation(self, now_us: int) -> int:
        """A number for the next incarnation."""
        return next_incarnation(
            last=self.outbox.incarnation,
            saved=self.saved_incarnation,
            requested=self._requested,
            now_us=now_us,
            rng=self._rng,
        )

    @property
    def snapshot_bytes(self) -> int:
        """Approximate size of a snapshot now."""
        return (self.ledger.digest.blocks + 3 * self.ledger.marked_blocks) * HASH_BYTES

    def begin_incarnation(self, incarnation: int, now_us: int, headers: Headers = None) -> bool:
        """Begin the due incarnation with a snapshot of everything published, after folding pending events. `headers`: for its
        messages.

        Does nothing and returns False if this publisher has yielded, or if a snapshot above `incarnation` has been requested
        in the meantime (use another number).
        """
        if self.yielded or incarnation <= max(self.outbox.incarnation, self.saved_incarnation, self._requested):
            return False
        self.fold()
        self._sealed = self._lost = False
        chunks = self.ledger.snapshot()
        ledger = self.ledger
        messages = self.outbox.begin(
            incarnation,
            chunks,
            ledger.digest_words,
            ledger.uses,
            now_us,
            dropped=ledger.dropped,
            marks=ledger.mark_snapshot(),
            headers=headers,
        )
        self.begun_us, self.begun_because, self.incarnation_due = now_us, self.incarnation_due, None
        self.snapshot_request = None
        self._checkpoints.reset()
        self._counters.snapshots += 1
        self._counters.snapshot_blocks += self.ledger.digest.blocks
        self._counters.messages += messages
        return True

    # ---------------------------------------------------------------- another publisher of the worker

    def record_heartbeat(self, incarnation: int) -> bool:
        """Record a heartbeat of this worker. Returns True if it is from a newer publisher."""
        if not self.outbox.incarnation or incarnation <= self.outbox.incarnation:
            return False
        self._requested = max(self._requested, incarnation)
        return True

    def yield_worker(self) -> None:
        """Publish nothing more until `take_over`, but continue to follow the engine."""
        self.yielded = True
        self._lost = False
        self.outbox.drop()
        self.require_incarnation(IncarnationReason.TAKEN_OVER)

    def take_over(self) -> None:
        """Take over from the other publisher, which is silent: a new incarnation above the other's is due."""
        self.yielded = False

    # ---------------------------------------------------------------- checkpoints

    def checkpoint_in(self, now_s: float) -> float | None:
        """Seconds until a checkpoint is due; None if none will be."""
        return self._checkpoints.due_in(now_s) if not self.outbox.overflowed else None

    def checkpoint(self, now_us: int) -> None:
        """Put a checkpoint of everything published in the outbox. It does not include pending events."""
        if self.outbox.overflowed or not self.outbox.incarnation:
            return
        self._checkpoints.reset()
        if self.outbox.checkpoint(self.ledger.digest_words, now_us):
            self._counters.checkpoints += 1
            self._counters.messages += 1
        else:
            self._overflow()

    def _overflow(self) -> None:
        """Abandon this incarnation: the outbox accepts no more of its messages."""
        self._counters.overflows += 1
        self._lost = True
        self.require_incarnation(IncarnationReason.OVERFLOW)

    @property
    def flushed(self) -> bool:
        """True if the stream has everything that was recorded."""
        return not self._pending and self.incarnation_due is None and self.outbox.incarnation > 0 and self.outbox.empty

    def _count(self, events: Sequence[IndexEvent], messages: int) -> None:
        counters = self._counters
        counters.messages += messages
        for event in events:
            if isinstance(event, Stored):
                counters.blocks_stored += len(event.hashes) // HASH_BYTES
            elif isinstance(event, Removed):
                counters.blocks_removed += len(event.hashes) // HASH_BYTES
            elif isinstance(event, Cleared):
                counters.clears += 1
