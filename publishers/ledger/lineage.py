"""Maps each engine hash to a block and its chain: engine hash -> (scope, sequence hash, parent, index).

An engine names blocks by its own hashes. The ledger computes the sequence hash when a block is first stored, and remembers it
after the block is evicted (bounded, first evicted first forgotten), so that a child stored late still finds its parent's chain.
A block without a name is kept only while a named block descends from it.

Common operations work on whole plain stretches (`add`, `find_evicted`, `cut`). All others first take a block out of its stretch
(`block`, `take_out`, `extend`).
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import NamedTuple

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.identity import OWN_CHAIN, Scope
from kvatlas_publishers.engine_events import EngineHash, EngineStored
from kvatlas_publishers.ledger.block import Block, Namespace, Stretch
from kvatlas_publishers.ledger.block_bytes import BlockBytes
from kvatlas_publishers.ledger.engine_hashes.variants import Variants
from kvatlas_publishers.ledger.settings import LedgerSettings

LONG_STRETCH = 128
"""Maximum number of blocks in a stretch. Taking a block out moves the names after it."""
SHORT_STRETCH = 16
"""A stretch with fewer blocks than this is joined with the one before it, because engines report generated tokens block
by block."""


class Place(NamedTuple):
    """The place of a stored event's blocks: after the last block of `parent`, or at a root. `hashes`: the blocks' packed
    sequence hashes."""

    namespace: Namespace
    parent: Stretch | None
    hashes: bytes


class Part(NamedTuple):
    """The blocks `first` to `last` - 1 of a stretch."""

    stretch: Stretch
    first: int
    last: int


class Lineage:
    """Engine hashes, their blocks, and the blocks' chains. Does not decide residency."""

    def __init__(self, settings: LedgerSettings, block_bytes: BlockBytes) -> None:
        self._settings = settings
        self.block_bytes = block_bytes
        self.counts: dict[EngineHash, int] = {}
        """Counts of copies in the device tier, for blocks that are not plain. It is the holding's own dictionary."""
        self.namespaces: dict[tuple[str | None, str | None, str], Namespace] = {}
        """Namespaces that have blocks, by (adapter, salt, chain)."""
        self.uses: dict[bytes, ScopeUse] = {}
        """Scopes that have blocks, or had some since the last call of `forget_unused_scopes`."""
        self.known: dict[EngineHash, Stretch] = {}
        """The stretch with a hash's block; for a shared hash, the first one."""
        self.changed: list[Stretch] = []
        """Stretches whose copies changed, and parts cut off others, since residency last took them; may list some twice."""
        self.evicted: OrderedDict[EngineHash, None] = (
            OrderedDict()
        )  # finding a dict's first key again and again is slow
        """Known hashes that no tier holds, in order of eviction."""
        self.variants = Variants()
        self._others: dict[EngineHash, list[Block]] = {}
        """The other blocks of each shared hash."""
        self._namespaces_of: dict[bytes, int] = {}
        """Number of namespaces of each scope."""
        self._maybe_unused: set[bytes] = set()

    def release(self) -> None:
        """Break the reference cycles between blocks, so that an emptied ledger's memory is freed immediately, without the
        garbage collector. Don't use the lineage afterwards."""
        for blocks in (self.known.values(), self.variants.detached.values(), *self._others.values()):
            for block in blocks:
                block.parent = block.children = None
        for held in (self.known, self.variants.detached, self._others, self.counts, self.evicted):
            held.clear()

    # ---------------------------------------------------------------- chains

    def namespace(self, adapter: str | None, salt: str | None, block_size: int, chain: str = OWN_CHAIN) -> Namespace:
        """The namespace of a root's chain. It is kept only while it has blocks, since each request may have its own salt.

        Raises InvalidValue if adapter or salt is not a valid field of a scope.
        """
        found = self.namespaces.get((adapter, salt, chain))
        if found is None:
            settings = self._settings
            mapped = settings.salt_is_tenant and salt is not None
            tenant_id = salt if settings.salt_is_tenant and salt is not None else settings.tenant_id
            scope = Scope(settings.model_id, settings.tokenizer_id, adapter, tenant_id, chain)
            found = Namespace(scope.scope_id, adapter, salt, None if mapped else salt, chain)
            self.uses.setdefault(scope.scope_id, ScopeUse(scope, *self.block_bytes.of(scope.scope_id, block_size)))
            self._maybe_unused.add(scope.scope_id)
        return found

    def tell_block_bytes(self, namespace: Namespace, tier: Tier, block_bytes: int) -> None:
        """Record the block size in bytes that an event gives for the namespace and tier."""
        if self.block_bytes.tell(namespace.scope_id, tier, block_bytes):
            self._read_scope(namespace.scope_id)

    def read_block_bytes(self) -> None:
        """Update all scopes' block sizes after a change that affects all of them."""
        for scope_id in self.uses:
            self._read_scope(scope_id)

    def _read_scope(self, scope_id: bytes) -> None:
        use = self.uses[scope_id]
        self.uses[scope_id] = ScopeUse(use.scope, *self.block_bytes.of(scope_id, use.block_size))

    def extend(self, namespace: Namespace, parent: Stretch | None, packed: bytes) -> list[Block]:
        """The blocks with these packed sequence hashes that follow `parent`. Missing ones are created."""
        blocks: list[Block] = []
        for at in range(0, len(packed), HASH_BYTES):
            sequence_hash = packed[at : at + HASH_BYTES]
            found = namespace.roots.get(sequence_hash) if parent is None else parent.child(sequence_hash)
            if found is None:
                found = self._make(namespace, parent, sequence_hash)
            parent = self.take_out(found, 0)
            blocks.append(parent)
        return blocks

    def add(
        self, namespace: Namespace, parent: Stretch | None, packed: bytes, names: Sequence[EngineHash], copies: int
    ) -> list[Stretch]:
        """Create plain stretches of new blocks, whose names are not known yet."""
        if parent is not None:
            parent = self._join(parent)
        made: list[Stretch] = []
        for first in range(0, len(names), LONG_STRETCH):
            some = tuple(names[first : first + LONG_STRETCH])
            parent = self._make(
                namespace, parent, packed[HASH_BYTES * first : HASH_BYTES * (first + LONG_STRETCH)], some, copies
            )
            self.known.update(dict.fromkeys(some, parent))
            made.append(parent)
        return made

    def _make(
        self,
        namespace: Namespace,
        parent: Stretch | None,
        packed: bytes,
        names: tuple[EngineHash, ...] = (),
        copies: int = 0,
    ) -> Stretch:
        made = Stretch(namespace, 0 if parent is None else parent.index + len(parent), packed, parent, names, copies)
        if parent is None:
            self._add_root(made)
        elif parent.children is None:
            parent.children = made
        else:
            parent.add_child(made)
        return made

    def _join(self, stretch: Stretch) -> Stretch:
        """Join a short plain stretch with the one that it continues, if they match. Both are then published in the same
        way, so both have been settled, and settling them again changes nothing."""
        before = stretch.parent
        if (
            before is None
            or len(stretch.names) >= SHORT_STRETCH
            or len(before.names) + len(stretch.names) > LONG_STRETCH
            or not (stretch.plain and before.plain and before.children is stretch)
            or not stretch.copies == before.copies == stretch.usable == before.usable == 1
        ):
            return stretch
        before.absorb(stretch)
        self.known.update(dict.fromkeys(stretch.names, before))
        return before

    # ---------------------------------------------------------------- parts of stretches

    def cut(self, stretch: Stretch, at: int) -> Stretch:
        """Cut a plain stretch before its block number `at`, which is not the first. Returns the second part."""
        rest = stretch.cut(at)
        self.known.update(dict.fromkeys(rest.names, rest))
        self.changed.append(rest)
        return rest

    def cut_out(self, part: Part) -> Stretch:
        """Make these blocks of a plain stretch a separate stretch."""
        stretch, first, last = part
        if last < len(stretch.names):
            self.cut(stretch, last)
        return self.cut(stretch, first) if first else stretch

    def take_out(self, stretch: Stretch, at: int) -> Block:
        """Separate block number `at` from its stretch. Its copies are then counted by name."""
        if stretch.plain:
            stretch = self.cut_out(Part(stretch, at, at + 1))
            stretch.plain = False
            if stretch.copies:
                self.counts[stretch.names[0]] = 1
        return Block(stretch)

    def block(self, name: EngineHash) -> Block | None:
        """Take the block with this hash (the first one, if several share it) out of its stretch. None if unknown."""
        stretch = self.known.get(name)
        if stretch is None:
            return None
        return self.take_out(stretch, stretch.names.index(name)) if stretch.plain else Block(stretch)

    def plain(self) -> Iterable[Stretch]:
        return dict.fromkeys(stretch for stretch in self.known.values() if stretch.plain)

    def take_out_all(self) -> None:
        """Take every block out of its stretch."""
        for stretch in self.plain():
            for at in reversed(range(len(stretch.names))):
                self.take_out(stretch, at)

    def find_evicted(self, place: Place, names: Sequence[EngineHash]) -> list[Part] | None:
        """The plain stretches of evicted blocks that a stored event begins with, block for block. None if the names stand for
        other blocks."""
        parts: list[Part] = []
        at = 0
        while at < len(names) and (stretch := self.known.get(names[at])) is not None:
            if not stretch.plain or stretch.copies or stretch.namespace is not place.namespace:
                return None
            first = stretch.names.index(names[at])
            alike = takewhile(lambda two: two[0] == two[1], zip(names[at:], stretch.names[first:], strict=False))
            last = first + sum(1 for _ in alike)
            there, here = slice(HASH_BYTES * first, HASH_BYTES * last), HASH_BYTES * at
            if stretch.hashes[there] != place.hashes[here : here + HASH_BYTES * (last - first)]:
                return None
            parts.append(Part(stretch, first, last))
            at += last - first
        return parts

    def drop(self, block: Stretch | None) -> None:
        """Forget the block and its ancestors, up to the first one with a name or another descendant."""
        while block is not None and not block.named and block.children is None:
            parent = block.parent
            if parent is not None:
                parent.remove_child(block)
            else:
                self._drop_root(block)
            block = parent

    def _add_root(self, block: Stretch) -> None:
        namespace = block.namespace
        if not namespace.roots:
            self.namespaces[namespace.adapter, namespace.salt, namespace.chain] = namespace
            self._namespaces_of[namespace.scope_id] = self._namespaces_of.get(namespace.scope_id, 0) + 1
        namespace.roots[block.sequence_hash] = block

    def _drop_root(self, block: Stretch) -> None:
        namespace = block.namespace
        del namespace.roots[block.sequence_hash]
        if not namespace.roots:
            del self.namespaces[namespace.adapter, namespace.salt, namespace.chain]
            self._namespaces_of[namespace.scope_id] -= 1
            if not self._namespaces_of[namespace.scope_id]:
                del self._namespaces_of[namespace.scope_id]
                self._maybe_unused.add(namespace.scope_id)

    def forget_unused_scopes(self) -> None:
        """Drop scopes without blocks. Call it after all events that name these scopes have been published."""
        for scope_id in self._maybe_unused:
            if scope_id not in self._namespaces_of:
                self.uses.pop(scope_id, None)
                self.block_bytes.forget_scope(scope_id)
        self._maybe_unused.clear()

    # ---------------------------------------------------------------- names

    def add_name(self, name: EngineHash, block: Block) -> None:
        """Record that the new `name` stands for `block` from now on."""
        self.known[name] = block
        if self.variants.detached.pop(name, None) is not None:
            self.variants.touch((name,))
            return  # already counted
        block.named += 1
        if block.named == 1:
            block.names = (name,)
        else:
            for child in list(block.iter_children()):
                self.take_out(child, 0)
            self.variants.add(name, block)

    def share_name(self, name: EngineHash, block: Block) -> None:
        """Record that the known `name` also stands for `block`."""
        self._others.setdefault(name, []).append(block)
        block.named += 1
        if block.named == 1:
            block.names = (name,)

    def find_parent(self, event: EngineStored) -> Stretch | None:
        """The stretch that ends with the event's parent block; None if the parent is unknown in the event's namespace."""
        name = event.parent
        stretch = None if name is None else self.find(name, event)
        if stretch is not None and stretch.plain and stretch.names[-1] != name:
            self.cut(stretch, stretch.names.index(name) + 1)
        return stretch

    def stretches_named(self, name: EngineHash) -> list[Stretch]:
        """The stretches that contain blocks with this hash, in any namespace."""
        known = self.known.get(name)
        return [] if known is None else [known, *self._others.get(name, ())]

    def names_of(self, block: Stretch) -> list[EngineHash]:
        """The hashes of a block that is not plain. This searches all hashes."""
        others = [name for name, blocks in self._others.items() if any(one is block for one in blocks)]
        return [*(name for name, one in self.known.items() if one is block), *others]

    def find(self, name: EngineHash, event: EngineStored) -> Stretch | None:
        """The stretch with the block that the event means by `name` (its parent or one of its own); None if unknown in the
        event's namespace."""
        block = self.known.get(name)
        if block is None:
            return None
        any_salt, chain = event.salt is None and event.salt_inherited, event.chain
        others = self._others.get(name)
        for one in (block,) if others is None else (block, *others):
            namespace = one.namespace
            same = namespace.adapter == event.adapter and namespace.chain == chain
            if same and (any_salt or namespace.salt == event.salt):
                return one
        return None

    def mark_evicted(self, names: Iterable[EngineHash]) -> None:
        """Record that no tier holds these hashes any longer."""
        evicted = self.evicted
        for name in names:
            evicted[name] = None
            if self.variants.children_of:
                self.variants.touch((name,))

    def mark_held(self, name: EngineHash) -> None:
        """Record that a tier holds the hash."""
        self.evicted.pop(name, None)
        if self.variants.children_of:
            self.variants.touch((name,))

    def trim(self, capacity: int) -> tuple[dict[EngineHash, Stretch], list[Block]]:
        """Forget the hashes that were evicted first, down to `capacity`. Returns them with their stretches, and all blocks
        that have lost a hash while other blocks follow them."""
        forgotten: dict[EngineHash, Stretch] = {}
        lost: list[Block] = []
        while len(self.evicted) > capacity:
            name, _ = self.evicted.popitem(last=False)
            stretch = self.known[name]
            if stretch.plain and stretch.children is None and stretch.names[-1] == name:
                forgotten[name] = stretch
                self._forget_last(stretch)
                continue
            block = forgotten[name] = self.take_out(stretch, stretch.names.index(name) if stretch.plain else 0)
            del self.known[name]
            blocks = (block, *self._others.pop(name, ()), *self.variants.forget(name, block))
            self._remove_name(blocks)
            lost += blocks
        return forgotten, lost

    def _forget_last(self, stretch: Stretch) -> None:
        """Forget the last block of a plain stretch without children."""
        del self.known[stretch.names[-1]]
        if len(stretch.names) > 1:
            stretch.names, stretch.hashes = stretch.names[:-1], stretch.hashes[:-HASH_BYTES]
        else:
            stretch.named = 0
            self.drop(stretch)

    def _remove_name(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.named -= 1
            self.drop(block)
