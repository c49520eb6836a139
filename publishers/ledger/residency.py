"""Which blocks the engine holds: copies of hashes, as (tier, group) counts them, become copies of blocks.

Counts are references, since engines announce each physical copy: a block is held in a tier while a hash that stands for it
has a copy in every indexable group of that tier.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier
from kvatlas.events import EngineCleared, EngineDropped, EngineHash, EngineRemoved, EngineStored
from publishers.ledger.block import COPIES_BITS, Block, Stretch
from publishers.ledger.counters import LedgerCounters
from publishers.ledger.engine_groups import EngineGroups
from publishers.ledger.holdings import Holding, Holdings
from publishers.ledger.lineage import Lineage, Part, Place
from publishers.ledger.marks.sparse_holdings import SparseHoldings, is_held_elsewhere
from publishers.ledger.resolver import BlockResolver, has_keys
from publishers.ledger.shared_hashes import SharedHashes


class Residency:
    """The only writer of the holdings' counts and of `Stretch.copies`.

    An engine's usual events are of plain stretches: one copy of each block, in the device tier. Their counts are not in the
    holdings, which spares most of a ledger's memory and work. Before anything else happens to a block it is taken out.
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
        """`bits`: of the sparse groups that decide where a prompt can be resumed (`ReuseOfGroups.bits`). `one_by_one`: no
        stretch may be plain."""
        self.holdings = holdings
        self.sparse = SparseHoldings(holdings, max(map(len, bits.values()), default=1))
        self._groups = groups
        self._bits = bits
        self.shared = SharedHashes(lineage, holdings, counters, on_change=self._change_copies)
        self._lineage = lineage
        self._by_group, self._indexed = holdings.by_group, holdings.indexed
        self._shared_hashes = self.shared.by_hash
        self._block_of = lineage.block
        self._resolver = resolver
        self._counters = counters
        self._counting = not set_semantics
        self.unproven: set[EngineHash] = set()
        """Hashes whose block an offloaded event's tokens alone say: it is another one if the engine has keys for it."""
        self._unnamed: list[Block] = []
        self._evicted: list[EngineHash] = []
        self._shared_removals: list[tuple[EngineHash, Holding]] = []
        self._plain_removals: dict[EngineHash, None] = {}
        self._one_by_one = one_by_one
        self._device = self._find_device()
        """The holding that plain stretches are of: the device tier's only one of full attention."""

    def _find_device(self) -> Holding | None:
        device = self.holdings.of_tier(Tier.HBM)
        if len(device) != 1 or self._one_by_one:
            return None
        self._lineage.counts = device[0].counts
        return device[0]

    def take_changed(self) -> list[Stretch]:
        """What has changed its copies since the last call; some may come twice."""
        if self._evicted or self._shared_removals:
            self.end_removals()
        self.sparse.tie_small(lambda name: None if name in self._shared_hashes else self._block_of(name))
        lineage = self._lineage
        lineage.variants.settle(self.holdings.is_held, self._detach, self._attach)
        changed = lineage.changed
        if changed:
            lineage.changed = []
        return changed

    def count_by_name(self) -> None:
        """No stretch is plain from now on, and the holdings have every count."""
        self._lineage.take_out_all()
        self._device = None

    def resident(self) -> Iterator[tuple[Holding, EngineHash]]:
        """What the engine holds, whether it can be announced or not."""
        for holding in self._by_group.values():
            for name in holding.counts:
                yield holding, name
        if self._device is not None:
            for stretch in self._lineage.plain():
                if stretch.copies:
                    for name in stretch.names:
                        yield self._device, name

    def is_resident(self, tier: Tier, group: int, name: EngineHash) -> bool:
        """Does the engine hold a copy?"""
        holding = self._by_group.get((tier, group))
        if holding is None or name in holding.counts:
            return holding is not None
        stretch = self._lineage.known.get(name)
        return holding is self._device and stretch is not None and stretch.plain and stretch.copies > 0

    # ---------------------------------------------------------------- saved state

    def plain_copies(self, name: EngineHash) -> int | None:
        """How many copies are counted of a hash that may be in a plain stretch; None if it can't be."""
        if self._device is None or any(name in one.counts for one in self._indexed if one is not self._device):
            return None
        copies = self._device.counts.get(name, 0)
        return copies if copies <= 1 else None

    def restore_plain(self, place: Place, names: Sequence[EngineHash], copies: int) -> list[Stretch]:
        """Make plain stretches of saved blocks, whose copies were counted by name."""
        assert self._device is not None, "no saved block is plain without"
        made = self._lineage.add(place.namespace, place.parent, place.hashes, names, copies)
        if copies:
            for name in names:
                del self._device.counts[name]
        self._lineage.changed += made
        return made

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
        place = resolver.locate(event) if hashes else None
        if place is None:
            self._store_by_hash(event, holding)
            return
        if self.unproven and not event.offloaded:
            self.unproven.difference_update(hashes)
        if holding is not self._device or not self._store_plain(event, place):
            blocks = self._lineage.extend(*place)
            self._store_each(event, blocks, holding)
            if self._lineage.variants.names:
                self._hang(event, blocks)
        if resolver.awaiting:
            self._enter_awaiting(hashes)

    def _store_plain(self, event: EngineStored, place: Place) -> bool:
        """The usual store in the device tier, in one go: blocks that were evicted, as they were, then new ones, whose hashes
        are neither known nor counted. False, and nothing is done, for any other."""
        lineage, names = self._lineage, event.hashes
        if event.offloaded or lineage.variants.detached or place.parent in lineage.variants.names:
            return False
        evicted = lineage.find_evicted(place, names) if names[0] in lineage.known else []
        if evicted is None:
            return False
        back = sum(part.last - part.first for part in evicted)
        new = names[back:] if back else names
        hashes = place.hashes[HASH_BYTES * back :] if back else place.hashes
        if new and not self._is_new(new, hashes[:HASH_BYTES], evicted[-1] if evicted else None, place):
            return False
        parent = place.parent
        for part in evicted:
            parent = lineage.cut_out(part)
            parent.copies = 1
            lineage.changed.append(parent)
            for name in parent.names:
                del lineage.evicted[name]
        if new:
            lineage.changed += lineage.add(place.namespace, parent, hashes, new, 1)
        return True

    def _is_new(self, names: Sequence[EngineHash], first_hash: bytes, after: Part | None, place: Place) -> bool:
        """Are these hashes neither known nor counted, each once, and does no block begin where they belong: behind the part
        `after`, or at the place itself?"""
        once = dict.fromkeys(names)
        if len(once) < len(names) or not self._lineage.known.keys().isdisjoint(once):
            return False
        if any(not holding.counts.keys().isdisjoint(once) for holding in self._indexed if holding.counts):
            return False
        if after is not None and after.last < len(after.stretch.names):
            at = HASH_BYTES * after.last
            return after.stretch.hashes[at : at + HASH_BYTES] != first_hash
        parent = place.parent if after is None else after.stretch
        found = place.namespace.roots.get(first_hash) if parent is None else parent.child(first_hash)
        return found is None

    def _store_each(self, event: EngineStored, blocks: Sequence[Block], holding: Holding) -> None:
        """The store of any hashes, one after the other."""
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
        if name in self._shared_hashes or (block := self._lineage.block(name)) is None:
            return False
        del self._lineage.known[name]
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
        self._lineage.changed.append(block)

    def _store_sparse(self, event: EngineStored, holding: Holding) -> None:
        """Count copies of a group that residency says nothing of: its blocks are those that full attention stored under the
        same hashes."""
        counts, counting, bit, shared = holding.counts, self._counting, holding.bit, self._shared_hashes
        for name in event.hashes:
            count = counts.get(name, 0)
            counts[name] = count + 1 if counting else 1
            if bit and not count:
                block = self._block_of(name)
                if block is None:
                    if holding.part_bits:
                        self._change_parts(name, holding, self.sparse.gain)
                elif name not in shared and not is_held_elsewhere(name, holding):
                    self.sparse.gain(block, bit)
        if holding.part_bits and event.token_ids and not event.offloaded:  # a connector has orders of its own
            self.sparse.small.stored(event.hashes)

    def _change_parts(self, name: EngineHash, holding: Holding, change: Callable[[Block, int], None]) -> None:
        """A group with smaller blocks took a hash, or gave it up: `change` the bits of the announced blocks that have it."""
        if is_held_elsewhere(name, holding):
            return
        for anchor, number in self.sparse.small.tied.get(name, {}).items():
            block = self._block_of(anchor)
            if block is not None and anchor not in self._shared_hashes:
                change(block, holding.part_bits[number])

    def _split(self, name: EngineHash, owner: Block, holding: Holding, copies_before: int) -> None:
        """The hash stands for several blocks from now on: which of them a sparse group holds can't be known."""
        self.sparse.leave(name, owner)
        self.shared.split(name, owner, holding, copies_before)

    def _store_by_hash(self, event: EngineStored, holding: Holding) -> None:
        """Count copies of hashes that the event resolves to no blocks; those known by their hash are held then: a
        placeholder's in any scope, else in the event's own."""
        counts, lineage, shared = holding.counts, self._lineage, self.shared
        placeholder = not event.token_ids and event.local_hashes is None
        for name in event.hashes:
            owner = lineage.block(name)
            count = counts.get(name, 0)
            counts[name] = count + 1 if self._counting else 1
            if owner is None:
                continue
            block = owner if placeholder else lineage.find(name, event)
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

    def remove(self, event: EngineRemoved) -> None:
        """One copy of each hash is gone."""
        hashes, counters = event.hashes, self._counters
        counters.removed += len(hashes)
        holding = self._by_group.get((event.tier, event.group))
        if holding is None:
            counters.removed_unknown += len(hashes)
            return
        counts, unit, changed, shared = holding.counts, holding.unit, self._lineage.changed, self._shared_hashes
        block_of, evicted = self._block_of, self._evicted
        stretch_of = self._lineage.known.get if holding is self._device else None
        peers, indexable, bit = holding.peers, holding.indexable, holding.bit
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
            if not indexable:
                if bit and count == 1:
                    block = block_of(name)
                    if block is None:
                        if holding.part_bits:
                            self._change_parts(name, holding, self.sparse.lose)
                            self.sparse.forget_part(name)
                    elif name not in shared and not is_held_elsewhere(name, holding):
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

    def drop(self, event: EngineDropped) -> None:
        """All copies of each hash in the group are gone."""
        held = [holding for holding in self._by_group.values() if holding.group == event.group]
        self._counters.removed_unknown += sum(not any(self._copies(name, one) for one in held) for name in event.hashes)
        for holding in held:
            names = [name for name in event.hashes for _ in range(self._copies(name, holding))]
            if names:
                self.remove(EngineRemoved(names, holding.tier, event.group))

    def _copies(self, name: EngineHash, holding: Holding) -> int:
        return holding.counts.get(name, 0) or int(self.is_resident(holding.tier, holding.group, name))

    def end_removals(self) -> None:
        """A run of removals ended: an engine may remove a chain's parents first, and only the whole run shows which blocks of
        shared hashes they were, and which parts of stretches."""
        if self._plain_removals:
            self._remove_plain(self._plain_removals)
            self._plain_removals = {}
        if self._evicted:
            self._lineage.mark_evicted(self._evicted)
            self._evicted.clear()
        if self._shared_removals:
            self.shared.remove(self._shared_removals)
            self._shared_removals.clear()

    def _remove_plain(self, names: Iterable[EngineHash]) -> None:
        """The only copies of these blocks, each in a plain stretch, are gone."""
        lineage = self._lineage
        by_stretch: dict[Stretch, list[EngineHash]] = {}
        for name in names:
            by_stretch.setdefault(lineage.known[name], []).append(name)
        for stretch, some in by_stretch.items():
            for part in _parts(stretch, some):
                gone = lineage.cut_out(part)
                gone.copies = 0
                lineage.changed.append(gone)

    def clear(self, event: EngineCleared) -> None:
        """All copies in the tiers are gone."""
        self.end_removals()
        self._counters.cleared_events += 1
        cleared = [holding for holding in self._by_group.values() if holding.tier in event.tiers]
        shared, block_of = self._shared_hashes, self._block_of
        removed: list[EngineHash] = []
        if self._device in cleared:
            for stretch in self._lineage.plain():
                if stretch.copies:
                    stretch.copies = 0
                    self._lineage.changed.append(stretch)
                    removed += stretch.names
        done: set[Tier] = set()
        for holding in cleared:
            if not holding.indexable or holding.tier in done:
                continue
            done.add(holding.tier)  # one pass for all its groups: copies count what is held in all of them
            for name in holding.counts:
                block = block_of(name)
                if block is not None and name not in shared and holding.in_all(name):
                    block.copies -= holding.unit
                    self._lineage.changed.append(block)
                    removed.append(name)
        sparse: dict[int, set[EngineHash]] = {}
        for holding in cleared:
            if holding.bit:
                sparse.setdefault(holding.bit, set()).update(holding.counts)
        for holding in cleared:
            holding.counts.clear()
        for holding in cleared:
            for name in sparse.pop(holding.bit, ()):
                block = block_of(name)
                if block is None:
                    if holding.part_bits:
                        self._change_parts(name, holding, self.sparse.lose)
                        self.sparse.forget_part(name)
                elif name not in shared and not is_held_elsewhere(name, holding):
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
        for name in names:
            self.forget_behind(self._forget_name(name))

    def _forget_name(self, name: EngineHash) -> list[Block]:
        """Returns the blocks that lost a hash."""
        lineage = self._lineage
        block = lineage.block(name)
        if block is None:
            block = lineage.variants.detached.pop(name, None)
            if block is None:
                return []
        else:
            del lineage.known[name]
            self.sparse.leave(name, block)
            self._leave_tiers(name, block)
        lineage.mark_held(name)  # it is forgotten here
        unnamed = [block, *lineage.variants.forget(name, block)]
        for lost in unnamed:
            lost.named -= 1
        self._unnamed += unnamed
        return unnamed

    def forget_behind(self, blocks: Iterable[Block]) -> bool:
        """Forget the hashes behind those of the blocks that no hash stands for any more: another hash of the same block, which
        the engine may store later, does not lead to them. False if there are none."""
        behind = [name for block in blocks if not block.named for name in self._names_behind(block)]
        for name in behind:
            self._forget_name(name)
        return bool(behind)

    def _names_behind(self, block: Block) -> Iterator[EngineHash]:
        lineage, further = self._lineage, list(block.iter_children())
        for child in further:  # it grows
            for name in lineage.variants.names.get(Block(child), child.names) if child.named else ():
                if name not in self._shared_hashes and lineage.known.get(name) in (child, None):
                    yield name
            further += child.iter_children()

    def drop_unnamed(self) -> None:
        """Drop the blocks of forgotten hashes; called after their change was published."""
        if not self._unnamed:
            return
        for block in sorted(
            dict.fromkeys(self._unnamed), key=lambda block: block.index
        ):  # a leaf takes its ancestors along
            self._lineage.drop(block)
        self._unnamed.clear()

    # ---------------------------------------------------------------- tiers and groups

    def add_holding(self, tier: Tier, group: int) -> Holding:
        """A (tier, group) that the engine names for the first time. What the tier's other groups hold is not in it yet."""
        self.end_removals()
        indexable = self._groups.is_resident(group, self._resolver.block_size)
        peers = self.holdings.of_tier(tier) if indexable else []
        if peers and self._device in peers:
            self.count_by_name()
        if peers:
            for name in [name for name in peers[0].counts if peers[0].in_all(name)]:
                self._leave_tier(name, peers[0])
        holding = self.holdings.add(tier, group, indexable, self._bits.get(group, ()))
        if peers:
            self.shared.recount_all()
        self._device = self._find_device()
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
            self._lineage.changed.append(block)
        else:
            self._lineage.mark_evicted([name])

    def forget(self, forgotten: Mapping[EngineHash, Stretch]) -> None:
        """The lineage has forgotten these hashes, which stood for these blocks."""
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


def _parts(stretch: Stretch, names: Sequence[EngineHash]) -> Iterator[Part]:
    """The parts of a plain stretch that are these names', last part first."""
    if len(names) == len(stretch.names):
        yield Part(stretch, 0, len(names))
        return
    if len(names) == 1:
        at = stretch.names.index(names[0])
        yield Part(stretch, at, at + 1)
        return
    positions = sorted(map(stretch.names.index, names))
    last = positions[-1] + 1
    for at, before in zip(reversed(positions), [*positions[-2::-1], -2], strict=True):
        if before != at - 1:
            yield Part(stretch, at, last)
            last = before + 1
