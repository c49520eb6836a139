"""What one engine holds, and the change of it that is announced.

    EngineStored --resolver--> blocks --+
    EngineRemoved, EngineCleared -------+--residency--> changed blocks --prefix_closure--> change --index_events--> events

An engine batch becomes the change of usable residency (prefix-closed, full-attention groups only), as events in an order in
which each of them leaves a prefix-closed residency.

Left out, counted, and still referenced, so that a later removal finds its count:
- blocks whose parent is unknown, or known only in another scope: never re-rooted, and resolved once it is known;
- blocks that can't be hashed: token ids beyond 32 bits, tokens that are not a full block each;
- blocks of another size than the engine's (partial blocks);
- offload placeholders of an unknown hash. Those of a known one are copies of its block, in any scope. So are a connector's
  events with tokens; those of an unknown hash are left out if the engine uses adapters, salts or extra keys at all.
A block left out is taken in if the engine stores it again in a way that can be understood.

In doubt everything here under-reports: a count never exceeds the engine's own.
"""

from collections.abc import Iterator

from kvatlas.blocks.digest import Digest
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import InvalidValue
from kvatlas.events import (
    Cleared,
    EngineBatch,
    EngineHash,
    EngineRemoved,
    EngineStored,
    IndexEvent,
    ScopeUse,
    SnapshotChunk,
)
from publishers.ledger import dump as ledger_dump
from publishers.ledger.counters import LedgerCounters
from publishers.ledger.holdings import Holdings
from publishers.ledger.index_events import IndexEvents
from publishers.ledger.lineage import Lineage
from publishers.ledger.prefix_closure import PrefixClosure
from publishers.ledger.residency import Residency
from publishers.ledger.resolver import BlockResolver, has_keys
from publishers.ledger.settings import LedgerSettings

__all__ = ["REMEMBERED_EVICTIONS", "Ledger", "LedgerCounters", "LedgerSettings"]

REMEMBERED_EVICTIONS = 65_536
"""Engine hashes remembered after their last copy is gone (about 400 bytes each)."""


class Ledger:
    """Pure and synchronous: engine batches in, index events out."""

    def __init__(self, settings: LedgerSettings, *, remembered_evictions: int = REMEMBERED_EVICTIONS) -> None:
        self.settings = settings
        self.counters = LedgerCounters()
        self.other_block_size: int | None = None
        """Tokens of the engine's blocks, if they are not those that the settings say."""
        self._remembered_evictions = remembered_evictions
        self.empty()

    def empty(self) -> None:
        """Forget everything. No event says so: the caller starts a new incarnation."""
        self._begin(Holdings(), self.settings.block_size)

    def _begin(self, holdings: Holdings, block_size: int | None) -> None:
        """Know nothing but the holdings' counts."""
        settings = self.settings
        self.lineage = Lineage(settings)
        self._resolver = BlockResolver(self.lineage, self.counters, block_size)
        self._residency = Residency(
            self.lineage, self._resolver, holdings, self.counters, set_semantics=settings.set_semantics
        )
        self._closure = PrefixClosure()
        self._index_events = IndexEvents(settings.granularity)

    @property
    def block_size(self) -> int | None:
        """Tokens of the engine's full blocks; None until that is known."""
        return self._resolver.block_size

    @property
    def uses(self) -> dict[bytes, ScopeUse]:
        """Every scope that the last fold's events, or a snapshot taken before the next one, may name."""
        return self.lineage.uses

    @property
    def digest(self) -> Digest:
        """Of all that is announced now."""
        return self._index_events.digest

    @property
    def announced_blocks(self) -> int:
        """How many blocks are announced now, in whatever tiers."""
        return self._index_events.blocks

    @property
    def orphans(self) -> int:
        """How many blocks the engine holds behind a hole."""
        return self._closure.orphans

    # ---------------------------------------------------------------- folding

    def fold(self, batch: EngineBatch) -> list[IndexEvent]:
        """Take one batch in. Returns the net change of what is announced, in the order in which it must be published."""
        self.lineage.forget_unused_scopes()  # what was folded before is published by now
        residency = self._residency
        residency.drop_unnamed()
        cleared = False
        forgot_all = False
        for event in batch.events:
            if isinstance(event, EngineStored):
                if not self._resolver.uses_keys and has_keys(event):
                    self._resolver.uses_keys = True
                    residency.forget_unproven()
                if event.block_size != self._resolver.block_size and self._learn_block_size(event):
                    forgot_all = self._forget_blocks() or forgot_all
                    residency = self._residency
                residency.store(event)
            elif isinstance(event, EngineRemoved):
                residency.remove(event)
            else:
                residency.clear(event)
                cleared = True
        events: list[IndexEvent] = [Cleared()] if forgot_all else []
        if changed := residency.take_changed():
            change = self._closure.settle(changed)
            self.counters.withdrawn += change.withdrawn
            self.counters.restored += change.restored
            events += self._index_events.make(change, cleared)
        if len(self.lineage.evicted) > self._remembered_evictions:
            forgotten = self.lineage.trim(self._remembered_evictions)
            residency.shared.forget(forgotten)
            residency.unproven.difference_update(forgotten)
            self.counters.forgotten += len(forgotten)
        return events

    def _learn_block_size(self, event: EngineStored) -> bool:
        """Take a larger block for the full one, unless the size is set. True if blocks were resolved by another size."""
        if not event.indexable or not event.token_ids or event.offloaded:
            return False
        if event.block_size < 1 or len(event.token_ids) != event.block_size * len(event.hashes):
            return False
        if self.settings.block_size is not None:
            self.other_block_size = event.block_size
            return False
        if self.block_size is not None and event.block_size < self.block_size:
            return False
        known = self.block_size is not None
        self._resolver.block_size = event.block_size
        self.counters.block_size_learned += 1
        return known

    def _forget_blocks(self) -> bool:
        """Blocks were resolved by the size of a partial one: all are out, until they are stored again. Were some announced?"""
        announced = self.announced_blocks > 0
        uses_keys = self._resolver.uses_keys
        self._residency.end_removals()
        self._begin(self._residency.holdings, self.block_size)
        self._resolver.uses_keys = uses_keys
        return announced

    # ---------------------------------------------------------------- what is known

    def snapshot(self) -> list[SnapshotChunk]:
        """All that is announced now; at most 32 KiB of hashes a chunk, each of one chain."""
        return self._index_events.chunks(self.lineage.namespaces.values())

    def resident(self) -> Iterator[tuple[Tier, int, EngineHash]]:
        """What the engine holds: (tier, group, engine hash), whether it can be announced or not."""
        for holding in self._residency.holdings.by_group.values():
            for name in holding.counts:
                yield holding.tier, holding.group, name

    def announced(self) -> Iterator[tuple[bytes, Tier, EngineHash, int]]:
        """What is announced now: (scope id, tier, engine hash, sequence hash), one for each engine hash that holds it."""
        tiers = {holding.tier: holding for holding in self._residency.holdings.indexed}
        for name, owner in self.lineage.known.items():
            certain = self._residency.shared.by_hash.get(name)
            for block in certain or (owner,):
                if not self._index_events.is_announced(block):
                    continue
                for tier, holding in tiers.items():
                    if certain[block].flags & tier.flag if certain else holding.in_all(name):
                        value = int.from_bytes(block.sequence_hash, "little")
                        yield block.namespace.scope_id, tier, name, value

    # ---------------------------------------------------------------- saved state

    def dump(self) -> bytes:
        """All of it but the counters, for the saved state."""
        return ledger_dump.pack(self._identity, self.block_size, self.lineage, self._residency, self._resolver.awaiting)

    @classmethod
    def load(
        cls, dumped: bytes, settings: LedgerSettings, *, remembered_evictions: int = REMEMBERED_EVICTIONS
    ) -> "Ledger":
        """The ledger that `dump` wrote. Raises InvalidValue for other bytes, and for one saved under settings by which
        blocks have other hashes. Granularity may differ."""
        ledger = cls(settings, remembered_evictions=remembered_evictions)
        saved = ledger_dump.unpack(dumped, ledger._identity)
        try:
            ledger._restore(saved)
        except (LookupError, TypeError, ValueError) as error:
            raise InvalidValue(f"saved ledger contradicts itself: {error}") from error
        return ledger

    @property
    def _identity(self) -> list[str | int | bool | None]:
        one = self.settings
        return [
            one.model_id, one.tokenizer_id, one.tenant_id, one.block_size, one.set_semantics, one.salt_is_tenant
        ]  # fmt: skip

    def _restore(self, saved: ledger_dump.SavedLedger) -> None:
        self._resolver.block_size = saved.block_size
        self._resolver.uses_keys = True  # it is not saved; perhaps less is claimed than is held
        saved.restore(self.lineage, self._residency, self._resolver.awaiting)
        changed = sorted(self._residency.take_changed(), key=lambda block: block.index)
        self._index_events.make(self._closure.settle(changed), cleared=False)
