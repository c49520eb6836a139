"""Tells one worker's residency: engine events go into the ledger, its changes into the outbox (pure).

Invariants:
- what was put in the outbox of an incarnation, snapshot first, adds up to what the ledger announces, unless a new
  incarnation is wanted; then nothing more is put in until that has begun;
- a new incarnation is above every one before it, the saved one and every requested one.
"""

import random
from collections.abc import Sequence
from enum import StrEnum

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.events import Cleared, EngineBatch, EngineEvent, IndexEvent, Removed, Stored
from publishers.counters import PublisherCounters
from publishers.ledger.ledger import Ledger
from publishers.stream.checkpoints import CheckpointClock, CheckpointSettings
from publishers.stream.incarnation import next_incarnation
from publishers.stream.outbox import Headers, Outbox, OutboxLimits


class Want(StrEnum):
    """Why a new incarnation is wanted."""

    START = "start"
    STARTED_OVER = "the engine's cache is told anew"
    OVERFLOW = "the outbox was full"
    ASKED = "asked for"
    TAKEN_BACK = "another publisher of the worker fell silent"


class Telling:
    """See the module. Nothing is told before the first `want`."""

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
        self.wanted: Want | None = None
        self.saved_incarnation = saved_incarnation
        self.yielded = False
        """Another publisher tells of this worker: nothing is begun here."""
        self._counters = counters
        self._checkpoints = CheckpointClock(checkpoints or CheckpointSettings())
        self._rng = rng or random.Random()
        self._requested = 0
        self._pending: list[EngineEvent] = []

    # ---------------------------------------------------------------- from the engine

    @property
    def pending_events(self) -> int:
        """Engine events taken and not folded yet."""
        return len(self._pending)

    def take(self, batch: EngineBatch) -> None:
        """Remember a batch's events until `fold`: batches that are folded together cost one change."""
        self._counters.engine_batches += 1
        self._counters.engine_events += len(batch.events)
        self._counters.skipped_events += len(batch.skipped)
        self._pending.extend(batch.events)

    def fold(self) -> list[IndexEvent]:
        """Fold what was taken into the ledger; the change, to be told with `tell` before the next fold."""
        if not self._pending:
            return []
        events, self._pending = self._pending, []
        return self.ledger.fold(EngineBatch(events))

    def tell(self, events: Sequence[IndexEvent], now_us: int, now_s: float, headers: Headers = None) -> int:
        """Put a change in the outbox; how many messages. 0 also while a new incarnation is wanted: it tells it all."""
        if not events or self.wanted is not None or not self.outbox.incarnation:
            return 0
        messages = self.outbox.put(events, self.ledger.uses, now_us, headers)
        if not messages:
            self._counters.overflows += 1
            self.want(Want.OVERFLOW)
            return 0
        self._count(events, messages)
        self._checkpoints.told(messages, now_s)
        return messages

    def start_over(self) -> None:
        """What the engine holds is not known any more: the ledger is empty, and a new incarnation says so."""
        self._pending.clear()
        self.ledger.empty()
        if self.outbox.incarnation or self.wanted is not None:
            self.want(Want.STARTED_OVER)

    # ---------------------------------------------------------------- incarnations

    def want(self, why: Want) -> None:
        """A new incarnation is wanted. The first reason stands."""
        if self.wanted is None:
            self.wanted = why

    def request(self, above: int) -> bool:
        """Somebody doubts incarnation `above`: False where ours is above it already, so that nothing needs to be done.

        Raises InvalidValue where no incarnation is left above it.
        """
        if self.outbox.incarnation > above:
            return False
        next_incarnation(requested=above, now_us=0, rng=self._rng)
        self._requested = max(self._requested, above)
        if self.outbox.incarnation or self.wanted is not None:
            self.want(Want.ASKED)
        return True

    def reserve(self, now_us: int) -> int:
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
        """About how large a snapshot would be now."""
        return self.ledger.digest.blocks * HASH_BYTES

    def begin(self, incarnation: int, now_us: int) -> bool:
        """Begin the wanted incarnation with a snapshot of all that is announced, pending events folded in.

        False, and nothing is done, where it was asked meanwhile to be above `incarnation` (reserve another), or yielded.
        """
        if self.yielded or incarnation <= max(self.outbox.incarnation, self.saved_incarnation, self._requested):
            return False
        self.fold()
        chunks = self.ledger.snapshot()
        messages = self.outbox.begin(incarnation, chunks, self.ledger.digest.words, self.ledger.uses, now_us)
        self.wanted = None
        self._checkpoints.proven()
        self._counters.snapshots += 1
        self._counters.snapshot_blocks += self.ledger.digest.blocks
        self._counters.messages += messages
        return True

    # ---------------------------------------------------------------- another publisher of the worker

    def hear(self, incarnation: int) -> bool:
        """Somebody tells of this worker. True where that is another publisher, and the newer one."""
        if not self.outbox.incarnation or incarnation <= self.outbox.incarnation:
            return False
        self._requested = max(self._requested, incarnation)
        return True

    def yield_to_other(self) -> None:
        """Tell nothing more until `take_back`; what the engine holds is followed all the same."""
        self.yielded = True
        self.outbox.drop()
        self.want(Want.TAKEN_BACK)

    def take_back(self) -> None:
        """The other one fell silent: a new incarnation is wanted, above what was heard of it."""
        self.yielded = False

    # ---------------------------------------------------------------- checkpoints

    def checkpoint_in(self, now_s: float) -> float | None:
        """Seconds until a checkpoint is due; None where none will be."""
        return self._checkpoints.due_in(now_s) if self.wanted is None else None

    def checkpoint(self, now_us: int) -> None:
        """Put a checkpoint of all that was told. Pending events must have been folded and told before, or wait."""
        if self.wanted is not None or not self.outbox.incarnation:
            return
        self._checkpoints.proven()
        if self.outbox.checkpoint(self.ledger.digest.words, now_us):
            self._counters.checkpoints += 1
            self._counters.messages += 1
        else:
            self._counters.overflows += 1
            self.want(Want.OVERFLOW)

    @property
    def settled(self) -> bool:
        """All that was taken is in the stream."""
        return not self._pending and self.wanted is None and self.outbox.incarnation > 0 and self.outbox.empty

    def _count(self, events: Sequence[IndexEvent], messages: int) -> None:
        counters = self._counters
        counters.messages += messages
        counters.events += len(events)
        for event in events:
            if isinstance(event, Stored):
                counters.blocks_stored += len(event.hashes) // HASH_BYTES
            elif isinstance(event, Removed):
                counters.blocks_removed += len(event.hashes) // HASH_BYTES
            elif isinstance(event, Cleared):
                counters.clears += 1
