"""Which blocks the engine holds: copies of hashes, as (tier, group) counts them, become copies of blocks.

Counts are references, since engines announce each physical copy: a block is held in a tier while a hash that stands for it
has a copy in every indexable group of that tier.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter

from kvatlas.blocks.tiers import Tier
from kvatlas.events import EngineCleared, EngineHash, EngineRemoved, EngineStored
from publishers.ledger.block import COPIES_BITS, Block
from publishers.ledger.counters import LedgerCounters
from publishers.ledger.engine_groups import EngineGroups
from publishers.ledger.holdings import Holding, Holdings
from publishers.ledger.lineage import Lineage
from publishers.ledger.marks.sparse_holdings import SparseHoldings, is_held_elsewhere
from publishers.ledger.resolver import BlockResolver, has_keys
from publishers.ledger.shared_hashes import SharedHashes

_names_of = attrgetter("names")


class Residency:
    """The only writer of the holdings' counts and of `Block.copies`; remembers which blocks it changed."""

    def __init__(
        self,
        lineage: Lineage,
        resolver: BlockResolver,
        holdings: Holdings,
        counters: LedgerCounters,
        groups: EngineGroups,
        bits: Mapping[int, int],
        *,
        set_semantics: bool,
    ) -> None:
        """`bits`: of the sparse groups that decide where a prompt can be resumed (`ReuseOfGroups.bits`)."""
        self.holdings = holdings
        self.sparse = SparseHoldings(holdings)
        self._groups = groups
        self._bits = bits
        self.shared = SharedHashes(lineage, holdings, counters, on_change=self._change_copies)
        self._lineage = lineage
        self._by_group, self._indexed = holdings.by_group, holdings.indexed
        self._shared_hashes = self.shared.by_hash
        self._block_of = lineage.known.get
        self._resolver = resolver
        self._counters = counters
        self._counting = not set_semantics
        self.unproven: set[EngineHash] = set()
        """Hashes whose block an offloaded event's tokens alone say: it is another one if the engine has keys for it."""
        self._unnamed: list[Block] = []
        self._changed: list[Block] = []
        self._evicted: list[EngineHash] = []
        self._shared_removals: list[tuple[EngineHash, Holding]] = []

    def take_changed(self) -> list[Block]:
        """The blocks whose copies changed since the last call; some may come twice."""
        if self._evicted or self._shared_removals:
            self.end_removals()
        self._lineage.variants.settle(self.holdings.is_held, self._detach, self._attach)
        changed = self._changed
        if changed:
            self._changed = []
        return changed

    # ---------------------------------------------------------------- events

    def store(self, event: EngineStored) -> None:
        """One more copy of each hash."""
        if event.offloaded and event.token_ids:
            for part in self._split_by_knowledge(event):
                self._store(part)
        else:
            self._store(event)

    def _split_by_knowledge(self, event: EngineStored) -> Iterator[EngineStored]:
        """An offloaded event, its known hashes as a placeholder has them: they keep their blocks."""
        hashes, size, known = event.hashes, event.block_size, self._lineage.known
        if len(event.token_ids) != len(hashes) * size:
            yield event
            return
        first = 0
        for is_known, run in groupby(hashes, key=known.__contains__):
            last = first + len(list(run))
            yield replace(
                event,
                hashes=hashes[first:last],
                parent=hashes[first - 1] if first else event.parent,
                token_ids=() if is_known else event.token_ids[first * size : last * size],
                extra_keys=event.extra_keys[first:last] if event.extra_keys and not is_known else None,
            )
            first = last

    def _store(self, event: EngineStored) -> None:
        if self._evicted or self._shared_removals:
            self.end_removals()
        hashes, resolver = event.hashes, self._resolver
        self._counters.stored += len(hashes)
        holding = self._by_group.get((event.tier, event.group))
        if holding is None:
            holding = self.add_holding(event.tier, event.group)
        if not holding.indexable:
            self._store_sparse(event, holding)
            return
        blocks = resolver.resolve(event) if hashes else None
        if blocks is None:
            self._store_by_hash(event, holding)
            return
        if self.unproven and not event.offloaded:
            self.unproven.difference_update(hashes)
        if not self._store_new(event, blocks, holding):
            self._store_each(event, blocks, holding)
        if self._lineage.variants.names:
            self._hang(event, blocks)
        if resolver.awaiting:
            self._enter_awaiting(hashes)

    def _store_new(self, event: EngineStored, blocks: Sequence[Block], holding: Holding) -> bool:
        """The usual store, in one go: hashes that were neither known nor counted, each once, of blocks that no hash stood for.
        False, and nothing is done, for any other."""
        lineage, counts, new = self._lineage, holding.counts, dict.fromkeys(event.hashes, 1)
        if len(self._indexed) > 1 or self.sparse or event.offloaded or lineage.variants.detached:
            return False
        if len(new) < len(blocks) or not (counts.keys().isdisjoint(new) and lineage.known.keys().isdisjoint(new)):
            return False
        if any(map(_names_of, blocks)):
            return False
        counts.update(new)
        lineage.add_first_names(event.hashes, blocks)
        for block in blocks:
            block.copies += holding.unit
        self._changed += blocks
        return True

    def _store_each(self, event: EngineStored, blocks: Sequence[Block], holding: Holding) -> None:
        """The store of any hashes, one after the other."""
        hashes = event.hashes
        counts, unit, changed, shared = holding.counts, holding.unit, self._changed, self._shared_hashes
        block_of, count_of, counting = self._block_of, counts.get, self._counting
        alone, sparse = len(self._indexed) == 1, self.sparse
        for name, block in zip(hashes, blocks, strict=True):
            count = count_of(name, 0)
            counts[name] = count + 1 if counting else 1
            owner = block_of(name)
            if owner is None:
                self._lineage.add_name(name, block)
                if event.offloaded and not has_keys(event):
                    self.unproven.add(name)
                if count and not event.salt_inherited:  # the copies left out before may be another salt's
                    self.shared.add(name, block)
                    self.shared.store(name, block, holding, counting)
                    continue
                if not alone:
                    self.enter_tiers(name, block)
                    continue
                if sparse:
                    sparse.enter(name, block)
            elif owner is not block or (shared and name in shared):
                if name not in shared:
                    self._split(name, owner, holding, count)
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

    def _enter_awaiting(self, names: Sequence[EngineHash]) -> None:
        """What waited for these hashes is held as its own hashes are, behind the very hash that it named as its parent."""
        variants = self._lineage.variants
        for name, block, parent_name in self._resolver.resolve_awaiting(names):
            self.enter_tiers(name, block)
            if parent_name is not None and block.parent in variants.names:
                variants.hang(name, parent_name)

    def _hang(self, event: EngineStored, blocks: Sequence[Block]) -> None:
        """Note which hash of its parent's block each of these blocks is found behind, where there are several."""
        variants, parent_name = self._lineage.variants, event.parent
        for name, block in zip(event.hashes, blocks, strict=True):
            if parent_name is not None and block.parent in variants.names and name not in self._shared_hashes:
                variants.hang(name, parent_name)
            parent_name = name

    def _detach(self, name: EngineHash) -> bool:
        """The hash stands for no block for now. False if it is none that can be detached."""
        if name in self._shared_hashes or (block := self._lineage.known.pop(name, None)) is None:
            return False
        self._lineage.evicted.pop(name, None)
        self._lineage.variants.detached[name] = block
        self.sparse.leave(name, block)
        self._leave_tiers(name, block)
        return True

    def _attach(self, name: EngineHash) -> None:
        """The hash stands for its block again."""
        block = self._lineage.variants.detached[name]
        self._lineage.add_name(name, block)
        self.enter_tiers(name, block)
        self._enter_awaiting([name])

    def _leave_tiers(self, name: EngineHash, block: Block) -> None:
        """The block is no longer held by this hash, whatever is held of the hash."""
        for holding in {holding.tier: holding for holding in self._indexed if holding.in_all(name)}.values():
            block.copies -= holding.unit
        self._changed.append(block)

    def _store_sparse(self, event: EngineStored, holding: Holding) -> None:
        """Count copies of a group that residency says nothing of: its blocks are those that full attention stored under the
        same hashes."""
        counts, counting, bit, shared = holding.counts, self._counting, holding.bit, self._shared_hashes
        for name in event.hashes:
            count = counts.get(name, 0)
            counts[name] = count + 1 if counting else 1
            if bit and not count:
                block = self._block_of(name)
                if block is not None and name not in shared and not is_held_elsewhere(name, holding):
                    self.sparse.gain(block, bit)

    def _split(self, name: EngineHash, owner: Block, holding: Holding, copies_before: int) -> None:
        """The hash stands for several blocks from now on: which of them a sparse group holds can't be known."""
        self.sparse.leave(name, owner)
        self.shared.split(name, owner, holding, copies_before)

    def _store_by_hash(self, event: EngineStored, holding: Holding) -> None:
        """Count copies of hashes that the event resolves to no blocks; those known by their hash are held then: a
        placeholder's in any scope, else in the event's own."""
        counts, lineage, shared = holding.counts, self._lineage, self.shared
        placeholder = not event.token_ids
        for name in event.hashes:
            count = counts.get(name, 0)
            counts[name] = count + 1 if self._counting else 1
            owner = lineage.known.get(name)
            if owner is None:
                continue
            block = owner if placeholder else lineage.find(name, event)
            if block is not owner and name not in shared.by_hash:
                self._split(name, owner, holding, count)
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
        peers, indexable, bit = holding.peers, holding.indexable, holding.bit
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
                if bit and count == 1:
                    block = block_of(name)
                    if block is not None and name not in shared and not is_held_elsewhere(name, holding):
                        self.sparse.lose(block, bit)
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
        sparse: dict[int, set[EngineHash]] = {}
        for holding in cleared:
            if holding.bit:
                sparse.setdefault(holding.bit, set()).update(holding.counts)
        for holding in cleared:
            holding.counts.clear()
        for holding in cleared:
            for name in sparse.pop(holding.bit, ()):
                block = known.get(name)
                if block is not None and name not in shared and not is_held_elsewhere(name, holding):
                    self.sparse.lose(block, holding.bit)
        self.shared.clear(cleared)
        self._lineage.mark_evicted([name for name in removed if not self.holdings.is_held(name)])

    def forget_unproven(self) -> None:
        """The engine uses keys: which blocks these hashes stand for is not known."""
        self.forget_names(self.unproven)
        self.unproven.clear()

    def forget_names(self, names: Iterable[EngineHash]) -> None:
        """These hashes stand for no blocks any more, whatever is held of them, nor do those behind a block that is left without
        one. Not for shared ones."""
        self.end_removals()
        lineage = self._lineage
        for name in names:
            block = lineage.known.pop(name, None) or lineage.variants.detached.get(name)
            if block is None:
                continue
            if lineage.variants.detached.pop(name, None) is None:
                self.sparse.leave(name, block)
                self._leave_tiers(name, block)
            lineage.mark_held(name)  # it is forgotten here
            unnamed = [block, *lineage.variants.forget(name, block)]
            for lost in unnamed:
                lost.names -= 1
            self._unnamed += unnamed
            self.forget_behind(unnamed)

    def forget_behind(self, blocks: Iterable[Block]) -> bool:
        """Forget the hashes behind those of the blocks that no hash stands for any more: another hash of the same block, which
        the engine may store later, does not lead to them. False if there are none."""
        behind = [name for block in blocks if not block.names for name in self._names_behind(block)]
        self.forget_names(behind)
        return bool(behind)

    def _names_behind(self, block: Block) -> Iterator[EngineHash]:
        lineage, further = self._lineage, list(block.iter_children())
        for child in further:  # it grows
            for name in lineage.variants.names.get(child, (child.first_name,)) if child.names else ():
                if name not in self._shared_hashes and lineage.known.get(name) in (child, None):
                    yield name
            further += child.iter_children()

    def drop_unnamed(self) -> None:
        """Drop the blocks of forgotten hashes; called after their change was published."""
        for block in sorted(
            dict.fromkeys(self._unnamed), key=lambda block: block.index
        ):  # a leaf takes its ancestors along
            self._lineage.drop(block)
        self._unnamed.clear()

    # ---------------------------------------------------------------- tiers and groups

    def add_holding(self, tier: Tier, group: int) -> Holding:
        """A (tier, group) that the engine names for the first time. What the tier's other groups hold is not in it yet."""
        self.end_removals()
        indexable = self._groups.is_full(group)
        peers = self.holdings.of_tier(tier) if indexable else []
        if peers:
            for name in [name for name in peers[0].counts if peers[0].in_all(name)]:
                self._leave_tier(name, peers[0])
        holding = self.holdings.add(tier, group, indexable, self._bits.get(group, 0))
        if peers:
            self.shared.recount_all()
        return holding

    def enter_tiers(self, name: EngineHash, block: Block) -> None:
        """A hash became known: its block is held wherever the hash is."""
        if self.sparse:
            self.sparse.enter(name, block)
        flags = 0
        for holding in self._indexed:
            if not flags & holding.flag and holding.in_all(name):
                flags |= holding.flag
                block.copies += holding.unit
        if flags:
            self._changed.append(block)
        else:
            self._lineage.mark_evicted([name])

    def forget(self, forgotten: Mapping[EngineHash, Block]) -> None:
        """The lineage has forgotten these hashes, which stood for these blocks."""
        if self.sparse:
            for name, block in forgotten.items():
                if name not in self._shared_hashes:
                    self.sparse.leave(name, block)
        self.shared.forget(forgotten)
        self.unproven.difference_update(forgotten)

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
