"""The blocks that the engine holds. Copies of hashes, counted by (tier, group), become copies of blocks.

Counts are reference counts, since engines report each physical copy. A block is held in a tier while one of its hashes has a
copy in every indexable group of that tier.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from kvatlas.blocks.tiers import Tier
from kvatlas_publishers.engine_events import EngineCleared, EngineDropped, EngineHash, EngineRemoved, EngineStored
from kvatlas_publishers.ledger.block import COPIES_BITS, Block, Stretch
from kvatlas_publishers.ledger.counters import LedgerCounters
from kvatlas_publishers.ledger.engine_groups import EngineGroups
from kvatlas_publishers.ledger.engine_hashes.forgotten_names import ForgottenNames
from kvatlas_publishers.ledger.engine_hashes.resolver import BlockResolver, has_keys
from kvatlas_publishers.ledger.engine_hashes.shared_hashes import SharedHashes
from kvatlas_publishers.ledger.holdings import Holding, Holdings
from kvatlas_publishers.ledger.lineage import Lineage, Place
from kvatlas_publishers.ledger.marks.sparse_holdings import SparseHoldings
from kvatlas_publishers.ledger.plain_stretches import PlainStretches


class Residency:
    """The only writer of the holdings' counts and of `Stretch.copies`.

    Most blocks are in plain stretches, with one copy each in the device tier. Their counts are not in the holdings, which
    saves most of a ledger's memory and work. A block is taken out of its stretch before anything else happens to it.
    """

    def __init__(
        self,
        lineage: Lineage,
        resolver: BlockResolver,
        holdings: Holdings,
        counters: LedgerCounters,
        groups: EngineGroups,
        bits: Mapping[int, Sequence[int]],
        *,
        set_semantics: bool,
        one_by_one: bool,
    ) -> None:
        """`bits`: bits of the sparse groups that decide where a prompt can be resumed (`ReuseOfGroups.bits`). `one_by_one`:
        True if no stretch may be plain."""
        self.holdings = holdings
        self.shared = SharedHashes(lineage, holdings, counters, on_change=self._change_copies)
        parts = max(map(len, bits.values()), default=1)
        self.sparse = SparseHoldings(holdings, parts, block_of=lineage.block, shared=self.shared.by_hash)
        self.forgotten = ForgottenNames(lineage, self.shared.by_hash, self._leave)
        self._plain = PlainStretches(lineage, holdings)
        self._groups = groups
        self._bits = bits
        self._bits_of_device = sum(map(len, bits.values()))
        self._lineage = lineage
        self._by_group, self._indexed = holdings.by_group, holdings.indexed
        self._shared_hashes = self.shared.by_hash
        self._block_of = lineage.block
        self._resolver = resolver
        self._counters = counters
        self._counting = not set_semantics
        self.unproven: set[EngineHash] = set()
        """Hashes whose block is known only from an offloaded event's tokens. If the engine uses keys, the hash may really
        belong to a different block."""
        self._evicted: list[EngineHash] = []
        self._shared_removals: list[tuple[EngineHash, Holding]] = []
        self._plain_removals: dict[EngineHash, None] = {}
        self._one_by_one = one_by_one
        self._device = self._find_device()
        """The holding of plain stretches: the device tier's only holding of full attention."""

    def _find_device(self) -> Holding | None:
        device = self.holdings.of_tier(Tier.HBM)
        if len(device) != 1 or self._one_by_one:
            return None
        self._lineage.counts = device[0].counts
        return device[0]

    def take_changed(self) -> list[Stretch]:
        """Stretches whose copies changed since the last call; some may be listed twice."""
        if self._evicted or self._shared_removals:
            self.end_removals()
        self.sparse.tie_small()
        lineage = self._lineage
        lineage.variants.settle(self.holdings.is_held, self._detach, self._attach)
        changed = lineage.changed
        if changed:
            lineage.changed = []
        return changed

    def count_by_name(self) -> None:
        """Count by name from now on: no stretch is plain, and the holdings contain every count."""
        self._lineage.take_out_all()
        self._device = None

    def resident(self) -> Iterator[tuple[Holding, EngineHash]]:
        """Everything the engine holds, publishable or not."""
        for holding in self._by_group.values():
            for name in holding.counts:
                yield holding, name
        if self._device is not None:
            for stretch in self._lineage.plain():
                if stretch.copies:
                    for name in stretch.names:
                        yield self._device, name

    def is_resident(self, tier: Tier, group: int, name: EngineHash) -> bool:
        """True if the engine holds a copy."""
        holding = self._by_group.get((tier, group))
        if holding is None or name in holding.counts:
            return holding is not None
        stretch = self._lineage.known.get(name)
        return holding is self._device and stretch is not None and stretch.plain and stretch.copies > 0

    def is_removed(self, tier: Tier, group: int, name: EngineHash) -> bool:
        """True if the hash is known but its last copy is gone."""
        self.end_removals()
        return name in self._lineage.known and not self.is_resident(tier, group, name)

    # ---------------------------------------------------------------- saved state

    def plain_copies(self, name: EngineHash) -> int | None:
        """Number of copies of a hash that may be in a plain stretch; None if it can't be in one."""
        if self._device is None or any(name in one.counts for one in self._indexed if one is not self._device):
            return None
        copies = self._device.counts.get(name, 0)
        return copies if copies <= 1 else None

    def restore_plain(self, place: Place, names: Sequence[EngineHash], copies: int) -> list[Stretch]:
        """Make plain stretches from saved blocks, whose copies were counted by name."""
        assert self._device is not None, "no saved block is plain without a device tier"
        made = self._lineage.add(place.namespace, place.parent, place.hashes, names, copies)
        if copies:
            for name in names:
                del self._device.counts[name]
        self._lineage.changed += made
        return made

    # ---------------------------------------------------------------- events

    def store(self, event: EngineStored) -> None:
        """Add one more copy of each hash."""
        if self._evicted or self._shared_removals:
            self.end_removals()
        hashes, resolver = event.hashes, self._resolver
        self._counters.stored += len(hashes)
        holding = self._by_group.get((event.tier, event.group))
        if holding is None:
            holding = self.add_holding(event.tier, event.group)
        if not holding.indexable:
            self._counters.sparse += len(hashes)
            self.sparse.store(event, holding, counting=self._counting)
            return
        place = resolver.locate(event) if hashes else None
        if place is None:
            self._store_by_hash(event, holding)
            return
        if self.unproven and not event.offloaded:
            self.unproven.difference_update(hashes)
        if holding is not self._device or not self._plain.store(event, place):
            blocks = self._lineage.extend(*place)
            self._store_each(event, blocks, holding)
            if self._lineage.variants.names:
                self._hang(event, blocks)
        if resolver.awaiting:
            self._enter_awaiting(hashes)

    def _store_each(self, event: EngineStored, blocks: Sequence[Block], holding: Holding) -> None:
        """Store any hashes, one by one."""
        hashes = event.hashes
        counts, unit, changed, shared = holding.counts, holding.unit, self._lineage.changed, self._shared_hashes
        block_of, count_of, counting = self._block_of, counts.get, self._counting
        alone, sparse = len(self._indexed) == 1, self.sparse
        for name, block in zip(hashes, blocks, strict=True):
            owner = block_of(name)
            count = count_of(name, 0)
            counts[name] = count + 1 if counting else 1
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
        """Resolve the events that were waiting for these hashes. Their blocks are held as far as their own hashes are,
        after exactly the hash that they named as their parent."""
        variants = self._lineage.variants
        for name, block, parent_name in self._resolver.resolve_awaiting(names):
            self.enter_tiers(name, block)
            if parent_name is not None and block.parent in variants.names:
                variants.hang(name, parent_name)

    def _hang(self, event: EngineStored, blocks: Sequence[Block]) -> None:
        """Note after which of its parent's hashes a block is found, if the parent has several."""
        variants, parent_name = self._lineage.variants, event.parent
        for name, block in zip(event.hashes, blocks, strict=True):
            if parent_name is not None and block.parent in variants.names and name not in self._shared_hashes:
                variants.hang(name, parent_name)
            parent_name = name

    def _detach(self, name: EngineHash) -> bool:
        """Detach a hash: for now it stands for no block. Returns False if it can't be detached."""
        if name in self._shared_hashes or (block := self._lineage.block(name)) is None:
            return False
        del self._lineage.known[name]
        self._lineage.evicted.pop(name, None)
        self._lineage.variants.detached[name] = block
        self._leave(name, block)
        return True

    def _attach(self, name: EngineHash) -> None:
        """Undo `_detach`: the hash stands for its block again."""
        block = self._lineage.variants.detached[name]
        self._lineage.add_name(name, block)
        self.enter_tiers(name, block)
        self._enter_awaiting([name])

    def _leave(self, name: EngineHash, block: Block) -> None:
        """Record that the block is no longer held by this hash, even if copies of the hash are held."""
        self.sparse.leave(name, block)
        for holding in {holding.tier: holding for holding in self._indexed if holding.in_all(name)}.values():
            block.copies -= holding.unit
        self._lineage.changed.append(block)

    def _split(self, name: EngineHash, owner: Block, holding: Holding, copies_before: int) -> None:
        """Split a hash: it stands for several blocks from now on, and we can't tell which of them a sparse group holds."""
        self.sparse.leave(name, owner)
        self.shared.split(name, owner, holding, copies_before)

    def _store_by_hash(self, event: EngineStored, holding: Holding) -> None:
        """Count copies of hashes that the event does not resolve to blocks. If a hash is known, its block counts as held:
        in any scope if the event is a placeholder, otherwise only in the event's own scope."""
        counts, lineage, shared = holding.counts, self._lineage, self.shared
        placeholder = not event.token_ids and event.local_hashes is None
        sized = placeholder and event.block_bytes and event.block_size in (0, self._resolver.block_size)
        for name in event.hashes:
            owner = lineage.block(name)
            count = counts.get(name, 0)
            counts[name] = count + 1 if self._counting else 1
            if owner is None:
                continue
            block = owner if placeholder else lineage.find(name, event)
            if sized:
                lineage.tell_block_bytes(owner.namespace, event.tier, event.block_bytes)
            if block is not owner and name not in shared.by_hash:
                self._split(name, owner, holding, count)
            if name in shared.by_hash:
                if placeholder:
                    shared.store_any(name, holding)
                elif block is not None:
                    shared.store(name, Block(block), holding, self._counting)
            elif not count and holding.in_all(name):
                lineage.mark_held(name)
                owner.copies += holding.unit
                self._lineage.changed.append(owner)

    def hold(self, name: EngineHash, group: int) -> None:
        """Count a copy of a known hash that the device tier turns out to hold."""
        self.end_removals()
        event, holding = EngineStored([name], None, (), 0, group=group), self._by_group[Tier.HBM, group]
        if holding.indexable:
            self._store_by_hash(event, holding)
        else:
            self.sparse.store(event, holding, counting=True)

    def remove(self, event: EngineRemoved) -> None:
        """Remove one copy of each hash, or all copies if the event reports the removal of the last one."""
        hashes, counters = event.hashes, self._counters
        holding = self._by_group.get((event.tier, event.group))
        if event.last and holding is not None:
            hashes = [name for name in hashes for _ in range(max(1, self._copies(name, holding)))]
        counters.removed += len(hashes)
        if holding is None:
            counters.removed_unknown += len(hashes)
            return
        if not holding.indexable:
            counters.removed_unknown += self.sparse.remove(hashes, holding)
            return
        counts, unit, changed, shared = holding.counts, holding.unit, self._lineage.changed, self._shared_hashes
        block_of, evicted, peers = self._block_of, self._evicted, holding.peers
        stretch_of = self._lineage.known.get if holding is self._device else None
        alone = len(self._indexed) == 1
        for name in hashes:
            stretch = None if stretch_of is None else stretch_of(name)
            if stretch is not None and stretch.plain:
                if not stretch.copies or name in self._plain_removals:
                    counters.removed_unknown += 1
                else:
                    self._plain_removals[name] = None
                    evicted.append(name)
                continue
            count = counts.get(name)
            if count is None:
                counters.removed_unknown += 1
                continue
            if count > 1:
                counts[name] = count - 1
            else:
                del counts[name]
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

    def drop(self, event: EngineDropped) -> None:
        """Remove all copies of each hash in the group, or in all groups."""
        held = [one for one in self._by_group.values() if event.group is None or one.group == event.group]
        self._counters.removed_unknown += sum(not any(self._copies(name, one) for one in held) for name in event.hashes)
        for holding in held:
            names = [name for name in event.hashes for _ in range(self._copies(name, holding))]
            if names:
                self.remove(EngineRemoved(names, holding.tier, holding.group))

    def _copies(self, name: EngineHash, holding: Holding) -> int:
        return holding.counts.get(name, 0) or int(self.is_resident(holding.tier, holding.group, name))

    def end_removals(self) -> None:
        """Apply a finished run of removals. An engine may remove a chain's parents first, so only the whole run shows which
        blocks of shared hashes and which parts of stretches are gone."""
        if self._plain_removals:
            self._plain.remove(self._plain_removals)
            self._plain_removals = {}
        if self._evicted:
            self._lineage.mark_evicted(self._evicted)
            self._evicted.clear()
        if self._shared_removals:
            self.shared.remove(self._shared_removals)
            self._shared_removals.clear()

    def clear(self, event: EngineCleared) -> None:
        """Remove all copies in the tiers."""
        self.end_removals()
        self._counters.cleared_events += 1
        cleared = [holding for holding in self._by_group.values() if holding.tier in event.tiers]
        shared, block_of = self._shared_hashes, self._block_of
        removed = self._plain.clear() if self._device in cleared else []
        done: set[Tier] = set()
        for holding in cleared:
            if not holding.indexable or holding.tier in done:
                continue
            done.add(holding.tier)  # one pass per tier: `copies` counts hashes held in all its groups
            for name in holding.counts:
                block = block_of(name)
                if block is not None and name not in shared and holding.in_all(name):
                    block.copies -= holding.unit
                    self._lineage.changed.append(block)
                    removed.append(name)
        self.sparse.clear(cleared)
        for holding in cleared:
            holding.counts.clear()
        self.shared.clear(cleared)
        self._lineage.mark_evicted([name for name in removed if not self.holdings.is_held(name)])

    def forget_unproven(self) -> None:
        """Forget the blocks of unproven hashes: the engine uses keys, so they are unknown."""
        self.forget_names(self.unproven)
        self.unproven.clear()

    def forget_names(self, names: Iterable[EngineHash]) -> None:
        """Forget these hashes: they no longer stand for blocks, even if copies are held; see `ForgottenNames`."""
        self.end_removals()
        self.forgotten.forget(names)

    # ---------------------------------------------------------------- tiers and groups

    def add_holding(self, tier: Tier, group: int) -> Holding:
        """Add a (tier, group) on its first event. It does not hold the blocks of the tier's other groups yet."""
        self.end_removals()
        indexable = self._groups.is_resident(group, self._resolver.block_size)
        peers = self.holdings.of_tier(tier) if indexable else []
        if peers and self._device in peers:
            self.count_by_name()
        if peers:
            for name in [name for name in peers[0].counts if peers[0].in_all(name)]:
                self._leave_tier(name, peers[0])
        shift = 0 if tier is Tier.HBM else self._bits_of_device
        bits = [bit << shift for bit in self._bits.get(group, ())]
        holding = self.holdings.add(tier, group, indexable, bits)
        if peers:
            self.shared.recount_all()
        self._device = self._find_device()
        return holding

    def enter_tiers(self, name: EngineHash, block: Block) -> None:
        """Count a newly known hash's block as held wherever the hash is held."""
        if self.sparse:
            self.sparse.enter(name, block)
        flags = 0
        for holding in self._indexed:
            if not flags & holding.flag and holding.in_all(name):
                flags |= holding.flag
                block.copies += holding.unit
        if flags:
            self._lineage.changed.append(block)
        else:
            self._lineage.mark_evicted([name])

    def forget(self, forgotten: Mapping[EngineHash, Stretch]) -> None:
        """Forget these hashes of these blocks, as the lineage has done."""
        if self.sparse:
            for name, block in forgotten.items():
                if name not in self._shared_hashes:
                    self.sparse.leave(name, block)
        self.shared.forget(forgotten)
        self.unproven.difference_update(forgotten)

    def _leave_tier(self, name: EngineHash, holding: Holding) -> None:
        block = self._block_of(name)
        if block is not None and name not in self._shared_hashes:
            block.copies -= holding.unit
            self._lineage.changed.append(block)
            if not any(other.in_all(name) for other in self._indexed if other.tier is not holding.tier):
                self._lineage.mark_evicted([name])

    def _change_copies(self, block: Block, tier: Tier, held: bool) -> None:
        block.copies += (1 if held else -1) << COPIES_BITS * tier
        self._lineage.changed.append(block)
