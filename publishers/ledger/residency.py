"""Which blocks the engine holds: copies of hashes, as (tier, group) counts them, become copies of blocks.

Counts are references, since engines announce each physical copy: a block is held in a tier while a hash that stands for it
has a copy in every indexable group of that tier.
"""

from kvatlas.blocks.tiers import Tier
from kvatlas.events import EngineCleared, EngineHash, EngineRemoved, EngineStored
from publishers.ledger.block import COPIES_BITS, Block
from publishers.ledger.counters import LedgerCounters
from publishers.ledger.holdings import Holding, Holdings
from publishers.ledger.lineage import Lineage
from publishers.ledger.resolver import BlockResolver
from publishers.ledger.shared_hashes import SharedHashes


class Residency:
    """The only writer of the holdings' counts and of `Block.copies`; remembers which blocks it changed."""

    def __init__(
        self,
        lineage: Lineage,
        resolver: BlockResolver,
        holdings: Holdings,
        counters: LedgerCounters,
        *,
        set_semantics: bool,
    ) -> None:
        self.holdings = holdings
        self.shared = SharedHashes(lineage, holdings, counters, on_change=self._change_copies)
        self._lineage = lineage
        self._by_group, self._indexed = holdings.by_group, holdings.indexed
        self._shared_hashes = self.shared.by_hash
        self._block_of = lineage.known.get
        self._resolver = resolver
        self._counters = counters
        self._counting = not set_semantics
        self._changed: list[Block] = []
        self._evicted: list[EngineHash] = []
        self._shared_removals: list[tuple[EngineHash, Holding]] = []

    def take_changed(self) -> list[Block]:
        """The blocks whose copies changed since the last call; some may come twice."""
        if self._evicted or self._shared_removals:
            self.end_removals()
        changed = self._changed
        if changed:
            self._changed = []
        return changed

    # ---------------------------------------------------------------- events

    def store(self, event: EngineStored) -> None:
        """One more copy of each hash."""
        if self._evicted or self._shared_removals:
            self.end_removals()
        hashes, resolver = event.hashes, self._resolver
        self._counters.stored += len(hashes)
        holding = self._by_group.get((event.tier, event.group))
        if holding is None:
            holding = self.add_holding(event.tier, event.group, event.indexable)
        blocks = resolver.resolve(event) if holding.indexable and hashes else None
        if blocks is None:
            self._store_by_hash(event, holding)
            return
        counts, unit, changed, shared = holding.counts, holding.unit, self._changed, self._shared_hashes
        block_of, count_of, counting = self._block_of, counts.get, self._counting
        alone = len(self._indexed) == 1
        for name, block in zip(hashes, blocks, strict=True):
            count = count_of(name, 0)
            counts[name] = count + 1 if counting else 1
            owner = block_of(name)
            if owner is None:
                self._lineage.add_name(name, block)
                if count and not event.salt_inherited:  # the copies left out before may be another salt's
                    self.shared.add(name, block)
                    self.shared.store(name, block, holding, counting)
                    continue
                if not alone:
                    self.enter_tiers(name, block)
                    continue
            elif owner is not block or (shared and name in shared):
                if name not in shared:
                    self.shared.split(name, owner, holding, count)
                self.shared.store(name, block, holding, counting)
                continue
            elif count:
                continue
            else:
                if holding.peers and not holding.in_all(name):
                    continue
                self._lineage.mark_held(name)
            block.copies += unit
            changed.append(block)
        if resolver.awaiting:
            for name, block in resolver.resolve_awaiting(hashes):
                self.enter_tiers(name, block)

    def _store_by_hash(self, event: EngineStored, holding: Holding) -> None:
        """Count copies of hashes that the event resolves to no blocks; those known by their hash are held then: a
        placeholder's in any scope, else in the event's own."""
        counts, lineage, shared = holding.counts, self._lineage, self.shared
        placeholder = not event.token_ids
        for name in event.hashes:
            count = counts.get(name, 0)
            counts[name] = count + 1 if self._counting else 1
            owner = lineage.known.get(name)
            if not holding.indexable or owner is None:
                continue
            block = owner if placeholder else lineage.find(name, event)
            if block is not owner and name not in shared.by_hash:
                shared.split(name, owner, holding, count)
            if name in shared.by_hash:
                if placeholder:
                    shared.store_any(name, holding)
                elif block is not None:
                    shared.store(name, block, holding, self._counting)
            elif not count and holding.in_all(name):
                lineage.mark_held(name)
                owner.copies += holding.unit
                self._changed.append(owner)

    def remove(self, event: EngineRemoved) -> None:
        """One copy of each hash is gone."""
        hashes, counters = event.hashes, self._counters
        counters.removed += len(hashes)
        holding = self._by_group.get((event.tier, event.group))
        if holding is None:
            counters.removed_unknown += len(hashes)
            return
        counts, unit, changed, shared = holding.counts, holding.unit, self._changed, self._shared_hashes
        block_of, evicted = self._block_of, self._evicted
        peers, indexable = holding.peers, holding.indexable
        alone = len(self._indexed) == 1
        for name in hashes:
            count = counts.get(name)
            if count is None:
                counters.removed_unknown += 1
                continue
            if count > 1:
                counts[name] = count - 1
            else:
                del counts[name]
            if not indexable:
                continue
            if shared and name in shared:
                self._shared_removals.append((name, holding))
                continue
            if count > 1:
                continue
            block = block_of(name)
            if block is None or (peers and not all(name in peer for peer in peers)):
                continue
            block.copies -= unit
            changed.append(block)
            if alone or not self.holdings.is_held(name):
                evicted.append(name)

    def end_removals(self) -> None:
        """A run of removals ended: an engine may remove a chain's parents first, and only the whole run shows which blocks of
        shared hashes they were."""
        if self._evicted:
            self._lineage.mark_evicted(self._evicted)
            self._evicted.clear()
        if self._shared_removals:
            self.shared.remove(self._shared_removals)
            self._shared_removals.clear()

    def clear(self, event: EngineCleared) -> None:
        """All copies in the tiers are gone."""
        self.end_removals()
        self._counters.cleared_events += 1
        cleared = [holding for holding in self._by_group.values() if holding.tier in event.tiers]
        shared, known = self._shared_hashes, self._lineage.known
        removed: list[EngineHash] = []
        done: set[Tier] = set()
        for holding in cleared:
            if not holding.indexable or holding.tier in done:
                continue
            done.add(holding.tier)  # one pass for all its groups: copies count what is held in all of them
            for name in holding.counts:
                block = known.get(name)
                if block is not None and name not in shared and holding.in_all(name):
                    block.copies -= holding.unit
                    self._changed.append(block)
                    removed.append(name)
        for holding in cleared:
            holding.counts.clear()
        self.shared.clear(cleared)
        self._lineage.mark_evicted([name for name in removed if not self.holdings.is_held(name)])

    # ---------------------------------------------------------------- tiers and groups

    def add_holding(self, tier: Tier, group: int, indexable: bool) -> Holding:
        """A (tier, group) that the engine names for the first time. What the tier's other groups hold is not in it yet."""
        self.end_removals()
        peers = self.holdings.of_tier(tier) if indexable else []
        if peers:
            for name in [name for name in peers[0].counts if peers[0].in_all(name)]:
                self._leave_tier(name, peers[0])
        holding = self.holdings.add(tier, group, indexable)
        if peers:
            self.shared.recount_all()
        return holding

    def enter_tiers(self, name: EngineHash, block: Block) -> None:
        """A hash became known: its block is held wherever the hash is."""
        flags = 0
        for holding in self._indexed:
            if not flags & holding.flag and holding.in_all(name):
                flags |= holding.flag
                block.copies += holding.unit
        if flags:
            self._changed.append(block)
        else:
            self._lineage.mark_evicted([name])

    def _leave_tier(self, name: EngineHash, holding: Holding) -> None:
        block = self._lineage.known.get(name)
        if block is not None and name not in self._shared_hashes:
            block.copies -= holding.unit
            self._changed.append(block)
            if not any(other.in_all(name) for other in self._indexed if other.tier is not holding.tier):
                self._lineage.mark_evicted([name])

    def _change_copies(self, block: Block, tier: Tier, held: bool) -> None:
        block.copies += (1 if held else -1) << COPIES_BITS * tier
        self._changed.append(block)
