"""What one engine holds, and the change of it that is announced.

The ledger counts references by (engine hash, tier, group), since engines announce each physical copy, and keeps for each
engine hash the block it stands for (`resolver`, `lineage`). A batch is folded into the change of usable
residency (`prefix_closure`: prefix-closed, full-attention groups only), told in an order in which every event leaves a
prefix-closed residency (`index_events`).

Left out, counted, and still referenced, so that a later removal finds its count:
- blocks whose parent is unknown, or known only in another scope: never re-rooted, and placed when it becomes known;
- blocks that can't be hashed: token ids beyond 32 bits, tokens that are not a full block each;
- blocks of another size than the engine's (partial blocks);
- offload placeholders of a hash that is not known. Of a known one they are copies of its block, in any scope.
A left-out block is taken in when the engine stores it again in a way that can be understood.

Everything here under-reports in doubt: a count never exceeds the engine's own.
"""

from collections.abc import Iterator

from kvatlas.blocks.digest import Digest
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import InvalidValue
from kvatlas.events import (
    Cleared,
    EngineBatch,
    EngineCleared,
    EngineHash,
    EngineRemoved,
    EngineStored,
    IndexEvent,
    ScopeUse,
    SnapshotChunk,
)
from publishers.ledger import dump as ledger_dump
from publishers.ledger.counters import LedgerCounters
from publishers.ledger.holdings import Holding
from publishers.ledger.index_events import Announcement
from publishers.ledger.lineage import Block, Lineages
from publishers.ledger.prefix_closure import Closure
from publishers.ledger.resolver import Placement
from publishers.ledger.settings import LedgerSettings
from publishers.ledger.shared_hashes import TwinCopies, Twins

__all__ = ["REMEMBERED_EVICTIONS", "Ledger", "LedgerCounters", "LedgerSettings"]

REMEMBERED_EVICTIONS = 65_536
"""Engine hashes remembered after their last copy went (about 400 bytes each)."""


class Ledger:
    """Pure and synchronous: engine batches in, index events out."""

    def __init__(self, settings: LedgerSettings, *, remembered_evictions: int = REMEMBERED_EVICTIONS) -> None:
        self.settings = settings
        self.counters = LedgerCounters()
        self._remembered_evictions = remembered_evictions
        self.empty()

    def empty(self) -> None:
        """Forget everything. Nothing is told of it: the caller starts a new incarnation."""
        settings = self.settings
        self.block_size: int | None = settings.block_size
        self.holdings: dict[tuple[Tier, int], Holding] = {}
        self._indexed: list[Holding] = []
        self._touched: list[Block] = []
        self._shared_gone: list[tuple[EngineHash, Holding]] = []
        self._start_lineages()

    def _start_lineages(self) -> None:
        settings = self.settings
        self.lineages = Lineages(
            settings.model_id, settings.tokenizer_id, settings.tenant_id, settings.block_bytes, settings.salt_is_tenant
        )
        self._placement = Placement(self.lineages, self.counters)
        self._twins = Twins(self.lineages, self._indexed, self._touch, self.counters)
        self._closure = Closure()
        self._announcement = Announcement(settings.granularity)

    @property
    def uses(self) -> dict[bytes, ScopeUse]:
        """Every scope that the last fold's events, or a snapshot taken before the next one, may name."""
        return self.lineages.uses

    @property
    def digest(self) -> Digest:
        """Of all that is announced now."""
        return self._announcement.digest

    @property
    def announced_blocks(self) -> int:
        """How many blocks are announced now, in whatever tiers."""
        return self._announcement.blocks

    @property
    def orphans(self) -> int:
        """How many blocks the engine holds behind a hole."""
        return self._closure.orphans

    # ---------------------------------------------------------------- folding

    def fold(self, batch: EngineBatch) -> list[IndexEvent]:
        """Take one batch in; the net change of what is announced, in the order in which it must be told."""
        self.lineages.forget_unused()  # what was folded before is told by now
        cleared = False
        forgot_all = False
        for event in batch.events:
            if self._shared_gone and not isinstance(event, EngineRemoved):
                self._remove_shared()
            if isinstance(event, EngineStored):
                if event.block_size != self.block_size and self._learn_block_size(event):
                    forgot_all = self._forget_lineages() or forgot_all
                self._store(event)
            elif isinstance(event, EngineRemoved):
                self._remove(event)
            else:
                self._clear(event)
                cleared = True
        if self._shared_gone:
            self._remove_shared()
        events: list[IndexEvent] = [Cleared()] if forgot_all else []
        if self._touched:
            touched, self._touched = self._touched, []
            change = self._closure.settle(touched)
            self.counters.withdrawn += change.withdrawn
            self.counters.restored += change.restored
            events += self._announcement.tell(change, cleared)
        if len(self.lineages.evicted) > self._remembered_evictions:
            self.counters.forgotten += self.lineages.trim(self._remembered_evictions)
        return events

    def _learn_block_size(self, event: EngineStored) -> bool:
        """Take a larger block for the full one, where the size is not set. True where blocks were placed by another."""
        if self.settings.block_size is not None or not event.indexable or not event.token_ids:
            return False
        if self.block_size is not None and event.block_size < self.block_size:
            return False
        if event.block_size < 1 or len(event.token_ids) != event.block_size * len(event.hashes):
            return False
        known = self.block_size is not None
        self.block_size = event.block_size
        self.counters.block_size_learned += 1
        return known

    def _forget_lineages(self) -> bool:
        """Blocks were placed by the size of a partial one: all are out, until they are stored again."""
        told = self._announcement.blocks > 0
        self._touched.clear()
        self._start_lineages()
        return told

    def _store(self, event: EngineStored) -> None:
        hashes = event.hashes
        self.counters.stored += len(hashes)
        holding = self.holdings.get((event.tier, event.group))
        if holding is None:
            holding = self._new_holding(event.tier, event.group, event.indexable)
        chain = self._placement.place(event, self.block_size) if holding.indexable and hashes else None
        if chain is None:
            self._store_by_name(holding, event)
            return
        counts, unit, touched = holding.counts, holding.unit, self._touched
        known, evicted, twins = self.lineages.known, self.lineages.evicted, self.lineages.twins
        count_of, block_of = counts.get, known.get
        counting = not self.settings.set_semantics
        alone = len(self._indexed) == 1
        for name, block in zip(hashes, chain, strict=True):
            count = count_of(name, 0)
            counts[name] = count + 1 if counting else 1
            owner = block_of(name)
            if owner is None:
                known[name] = block
                block.names += 1
                if count and not event.salt_inherited:  # the copies left out before may be another salt's
                    self._twins.begin(name, block)
                    self._twins.store(name, block, holding, counting)
                    continue
                if not alone:
                    self._enter_tiers(name, block)
                    continue
            elif owner is not block or (twins and name in twins):
                if name not in twins:
                    self._twins.part(name, owner, holding, count)
                self._twins.store(name, block, holding, counting)
                continue
            elif count:
                continue
            else:
                if holding.peers and not holding.in_all(name):
                    continue
                evicted.pop(name, None)
            block.copies += unit
            if not block.touched:
                block.touched = True
                touched.append(block)
        if self.lineages.unplaced:
            for name, block in self._placement.place_behind(hashes, self.block_size):
                self._enter_tiers(name, block)

    def _store_by_name(self, holding: Holding, event: EngineStored) -> None:
        """Count copies of blocks that the event does not place; those known by their hash are held then: a placeholder's in
        any scope, else in the event's own."""
        counts, lineages, counting = holding.counts, self.lineages, not self.settings.set_semantics
        placeholder = not event.token_ids
        for name in event.hashes:
            count = counts.get(name, 0)
            counts[name] = count + 1 if counting else 1
            owner = lineages.known.get(name)
            if not holding.indexable or owner is None:
                continue
            block = owner if placeholder else lineages.meant(name, event)
            if block is not owner and name not in lineages.twins:
                self._twins.part(name, owner, holding, count)
            if name in lineages.twins:
                if placeholder:
                    self._twins.store_any(name, holding)
                elif block is not None:
                    self._twins.store(name, block, holding, counting)
            elif not count and holding.in_all(name):
                lineages.evicted.pop(name, None)
                owner.copies += holding.unit
                self._touch(owner)

    def _remove(self, event: EngineRemoved) -> None:
        hashes = event.hashes
        self.counters.removed += len(hashes)
        holding = self.holdings.get((event.tier, event.group))
        if holding is None:
            self.counters.removed_unknown += len(hashes)
            return
        counts, unit, touched = holding.counts, holding.unit, self._touched
        known, evicted, twins = self.lineages.known, self.lineages.evicted, self.lineages.twins
        peers = holding.peers
        alone = len(self._indexed) == 1
        indexable = holding.indexable
        for name in hashes:
            count = counts.get(name)
            if count is None:
                self.counters.removed_unknown += 1
                continue
            if count > 1:
                counts[name] = count - 1
            else:
                del counts[name]
            if not indexable:
                continue
            if twins and name in twins:
                self._shared_gone.append((name, holding))
                continue
            if count > 1:
                continue
            block = known.get(name)
            if block is None or (peers and not all(name in peer for peer in peers)):
                continue
            block.copies -= unit
            if not block.touched:
                block.touched = True
                touched.append(block)
            if alone or not self._is_held(name):
                evicted[name] = None

    def _remove_shared(self) -> None:
        """A run of removals ended: an engine may tell a chain's parents first, which blocks they were is seen from its end."""
        self._twins.remove(self._shared_gone)
        self._shared_gone.clear()

    def _clear(self, event: EngineCleared) -> None:
        self.counters.cleared_events += 1
        cleared = [holding for holding in self.holdings.values() if holding.tier in event.tiers]
        twins, known = self.lineages.twins, self.lineages.known
        went: list[EngineHash] = []
        done: set[Tier] = set()
        for holding in cleared:
            if not holding.indexable or holding.tier in done:
                continue
            done.add(holding.tier)  # one pass for all its groups: copies count what is held in all of them
            for name in holding.counts:
                block = known.get(name)
                if block is not None and name not in twins and holding.in_all(name):
                    block.copies -= holding.unit
                    self._touch(block)
                    went.append(name)
        for holding in cleared:
            holding.counts.clear()
        self._twins.clear(cleared)
        for name in went:
            if not self._is_held(name):
                self.lineages.evicted[name] = None

    # ---------------------------------------------------------------- tiers and groups

    def _new_holding(self, tier: Tier, group: int, indexable: bool) -> Holding:
        holding = self.holdings[tier, group] = Holding(tier, group, indexable)
        if indexable:
            peers = [other for other in self._indexed if other.tier is tier]
            if peers:  # what the tier's other groups hold is not in this one yet
                for name in [name for name in peers[0].counts if peers[0].in_all(name)]:
                    self._leave_tier(name, peers[0])
            for other in peers:
                other.peers.append(holding.counts)
            holding.peers = [other.counts for other in peers]
            self._indexed.append(holding)
            if peers:
                for name in self.lineages.twins:
                    self._twins.recount(name)
        return holding

    def _leave_tier(self, name: EngineHash, holding: Holding) -> None:
        block = self.lineages.known.get(name)
        if block is not None and name not in self.lineages.twins:
            block.copies -= holding.unit
            self._touch(block)
            if not any(other.in_all(name) for other in self._indexed if other.tier is not holding.tier):
                self.lineages.evicted[name] = None

    def _enter_tiers(self, name: EngineHash, block: Block) -> None:
        """A hash became known: its block is held wherever the hash is."""
        flags = 0
        for holding in self._indexed:
            if not flags & holding.flag and holding.in_all(name):
                flags |= holding.flag
                block.copies += holding.unit
        if flags:
            self._touch(block)
        else:
            self.lineages.evicted[name] = None

    def _is_held(self, name: EngineHash) -> bool:
        return any(holding.in_all(name) for holding in self._indexed)

    def _touch(self, block: Block) -> None:
        if not block.touched:
            block.touched = True
            self._touched.append(block)

    # ---------------------------------------------------------------- what is known

    def snapshot(self) -> list[SnapshotChunk]:
        """All that is announced now; at most 32 KiB of hashes a chunk, each of one chain."""
        return self._announcement.chunks(self.lineages.namespaces.values())

    def resident(self) -> Iterator[tuple[Tier, int, EngineHash]]:
        """What the engine holds: (tier, group, engine hash), whether it can be announced or not."""
        for holding in self.holdings.values():
            for name in holding.counts:
                yield holding.tier, holding.group, name

    def dump(self) -> bytes:
        """All of it but the counters, for the saved state."""
        return ledger_dump.pack(self._identity, self.block_size, self.lineages, self.holdings)

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
        self.block_size = saved.block_size
        holdings = [self._new_holding(one.tier, one.group, one.indexable) for one in saved.holdings]
        for holding, one in zip(holdings, saved.holdings, strict=True):
            holding.counts.update(one.counts)
        blocks = saved.place(self.lineages)
        for name, shares in saved.twins:
            by_block = {blocks[at]: TwinCopies({holdings[i]: count for i, count in share}) for at, share in shares}
            for block in list(by_block)[1:]:  # the first is its owner, and named already
                block.names += 1
            self.lineages.twins[name] = by_block
            self._twins.recount(name)
        for name, block in self.lineages.known.items():
            if name not in self.lineages.twins:
                self._enter_tiers(name, block)
        touched, self._touched = self._touched, []
        touched.sort(key=lambda block: block.index)
        self._announcement.tell(self._closure.settle(touched), cleared=False)

    def announced(self) -> Iterator[tuple[bytes, Tier, EngineHash, int]]:
        """What is announced now: (scope id, tier, engine hash, sequence hash), one for each engine hash that holds it."""
        tiers = {holding.tier: holding for holding in self._indexed}
        for name, owner in self.lineages.known.items():
            twins = self.lineages.twins.get(name)
            for block in twins or (owner,):
                if not self._announcement.is_announced(block):
                    continue
                for tier, holding in tiers.items():
                    if twins[block].flags & tier.flag if twins else holding.in_all(name):
                        value = int.from_bytes(block.sequence_hash, "little")
                        yield block.namespace.scope_id, tier, name, value
