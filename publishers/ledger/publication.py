"""Decides which of the blocks that the engine holds are published: changes in residency become events about usable
blocks and marks."""

from collections.abc import Iterable, Iterator

from kvatlas.blocks.digest import Digest
from kvatlas.blocks.kv_cache_groups import ResumptionRule
from kvatlas.blocks.tiers import Tier
from kvatlas.events import Heads, IndexEvent, Marked, SnapshotChunk
from kvatlas_publishers.engine_events import EngineHash
from kvatlas_publishers.ledger.block import Block, Stretch
from kvatlas_publishers.ledger.counters import LedgerCounters
from kvatlas_publishers.ledger.index_events import IndexEvents
from kvatlas_publishers.ledger.lineage import Lineage
from kvatlas_publishers.ledger.marks.mark_events import MarkEvents
from kvatlas_publishers.ledger.marks.marks import Marks
from kvatlas_publishers.ledger.prefix_closure import PrefixClosure, UsableChange
from kvatlas_publishers.ledger.residency import Residency


class Publication:
    """The published blocks and marks of one lineage."""

    def __init__(
        self,
        lineage: Lineage,
        residency: Residency,
        counters: LedgerCounters,
        rule: ResumptionRule | None,
        granularity: int,
    ) -> None:
        """`rule`: decides where a prompt can be resumed; None: marks are not used."""
        self._lineage = lineage
        self._residency = residency
        self._counters = counters
        self._closure = PrefixClosure()
        self._index_events = IndexEvents(granularity)
        self._marks = None if rule is None else Marks(rule)
        self._mark_events = MarkEvents()

    @property
    def digest(self) -> Digest:
        """Digest of the published blocks."""
        return self._index_events.digest

    @property
    def digest_words(self) -> list[int]:
        """`Digest.words`, followed by `MarkDigest.words` if marks are used."""
        words = self.digest.words
        return words if self._marks is None else words + self._mark_events.digest.words

    @property
    def blocks(self) -> int:
        """Number of published blocks, in any tier."""
        return self._index_events.blocks

    @property
    def marked_blocks(self) -> int:
        return self._mark_events.digest.marks

    @property
    def orphans(self) -> int:
        """Number of blocks that the engine holds after a hole."""
        return self._closure.orphans

    # ---------------------------------------------------------------- changes

    def settle(self, *, cleared: bool) -> list[IndexEvent]:
        """Publish what changed in residency since the last call. `cleared`: whole tiers were cleared. Returns the events."""
        change: UsableChange | None = None
        events: list[IndexEvent] = []
        if changed := self._residency.take_changed():
            change = self._closure.settle(changed)
            self._counters.withdrawn += change.withdrawn
            self._counters.restored += change.restored
            events = self._index_events.make(change, cleared)
        return self._with_marks(change, events)

    def begin(self) -> None:
        """Begin with the residency of a saved ledger, without creating events."""
        changed = sorted(self._residency.take_changed(), key=lambda block: block.index)
        change = self._closure.settle(changed)
        self._index_events.make(change, cleared=False)
        self._with_marks(change, [])

    def _with_marks(self, change: UsableChange | None, events: list[IndexEvent]) -> list[IndexEvent]:
        """The events for a change in residency, surrounded by those for the marks, so that marked blocks are held after
        each event."""
        if self._marks is None:
            return events
        touched = self._residency.sparse.take_changed()
        if change is not None:
            touched += change.added
            touched += [block for block, _ in (*change.removed, *change.moved)]
        if not touched:
            return events
        mark_change = self._marks.settle(dict.fromkeys(touched))
        if not mark_change.marked and not mark_change.unmarked:
            return events
        return self._mark_events.make(mark_change, events)

    # ---------------------------------------------------------------- state

    def snapshot(self) -> list[SnapshotChunk]:
        """All published blocks. Each chunk has at most 32 KiB of hashes, all from one chain."""
        return self._index_events.chunks(self._lineage.namespaces.values())

    def mark_snapshot(self) -> list[Marked | Heads]:
        """All marks and their heads; at most 32 KiB of hashes per event."""
        return [] if self._marks is None else self._mark_events.snapshot(self._marks)

    def marked(self) -> Iterable[Stretch]:
        return () if self._marks is None else self._marks.marked

    def announced(self) -> Iterator[tuple[bytes, Tier, EngineHash, int]]:
        """The published blocks: (scope id, tier, engine hash, sequence hash), once per engine hash that holds the block."""
        tiers = {holding.tier: holding for holding in self._residency.holdings.indexed}
        for stretch in self._lineage.plain():
            for place, value in self._index_events.announced(stretch):
                yield stretch.namespace.scope_id, Tier.HBM, stretch.names[place], value
        for name, owner in self._lineage.known.items():
            if owner.plain:
                continue
            certain = self._residency.shared.by_hash.get(name)
            for block in certain or (Block(owner),):
                if not any(self._index_events.announced(block)):
                    continue
                for tier, holding in tiers.items():
                    if certain[block].flags & tier.flag if certain else holding.in_all(name):
                        yield block.namespace.scope_id, tier, name, int.from_bytes(block.sequence_hash, "little")
