"""Which block of which chain each engine hash stands for: engine hash -> (scope, sequence hash, parent, index).

An engine names blocks by hashes of its own. The ledger computes the sequence hash when a block is first stored, and
remembers it after the block is evicted (bounded, first evicted first forgotten), so that a child that is stored late
still finds its parent's chain. A block without a name stays only while blocks with one descend from it.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.events import EngineHash, EngineStored, ScopeUse
from kvatlas.identity import Scope
from publishers.ledger.block import Block, Namespace, Stretch
from publishers.ledger.settings import LedgerSettings
from publishers.ledger.variants import Variants

LONG_STRETCH = 128
"""Blocks from which on a stretch takes no more: engines announce what they generate block by block, and adding copies it."""


class Lineage:
    """Engine hashes, the blocks they stand for, and the chains of these. Decides nothing of residency."""

    def __init__(self, settings: LedgerSettings) -> None:
        self._settings = settings
        self.namespaces: dict[tuple[str | None, str | None], Namespace] = {}
        """By (adapter, salt): those that have blocks."""
        self.uses: dict[bytes, ScopeUse] = {}
        """Of each scope that has blocks, and of those that had some since `forget_unused_scopes` was called."""
        self.known: dict[EngineHash, Block] = {}
        """The block that a hash stands for; of a shared hash the first one."""
        self.evicted: OrderedDict[EngineHash, None] = (
            OrderedDict()
        )  # finding a dict's first key again and again is slow
        """The known hashes that no tier holds, in the order of their eviction."""
        self.variants = Variants()
        self._others: dict[EngineHash, list[Block]] = {}
        """The further blocks of a shared hash."""
        self._namespaces_of: dict[bytes, int] = {}
        """How many namespaces each scope has."""
        self._maybe_unused: set[bytes] = set()

    # ---------------------------------------------------------------- chains

    def namespace(self, adapter: str | None, salt: str | None, block_size: int) -> Namespace:
        """The namespace of a root's chain; kept only while it has blocks, since each request may bring a salt of its own.

        Raises InvalidValue if adapter or salt can't be a scope's field.
        """
        found = self.namespaces.get((adapter, salt))
        if found is None:
            settings = self._settings
            mapped = settings.salt_is_tenant and salt is not None
            tenant_id = salt if settings.salt_is_tenant and salt is not None else settings.tenant_id
            scope = Scope(settings.model_id, settings.tokenizer_id, adapter, tenant_id)
            found = Namespace(scope.scope_id, adapter, salt, None if mapped else salt)
            self.uses[scope.scope_id] = ScopeUse(scope, block_size, settings.block_bytes)
            self._maybe_unused.add(scope.scope_id)
        return found

    def extend(self, namespace: Namespace, parent: Block | None, packed: bytes) -> list[Block]:
        """The blocks of packed sequence hashes that follow `parent`; blocks that don't exist yet are made."""
        found: list[Block] = []
        known = 0
        first = packed[:HASH_BYTES]
        block = namespace.roots.get(first) if parent is None else parent.child(first)
        while block is not None:
            found.append(block)
            parent = block
            known += HASH_BYTES
            block = block.child(packed[known : known + HASH_BYTES]) if known < len(packed) else None
        if known < len(packed):
            found += self._make(namespace, parent, packed[known:] if known else packed)
        return found

    def _make(self, namespace: Namespace, parent: Block | None, packed: bytes) -> list[Block]:
        """New blocks: the next of the parent's stretch, if it is the last of that."""
        stretch, first = self._stretch(namespace, parent, packed)
        made: list[Block] = []
        for at in range(first, first + len(packed) // HASH_BYTES):
            block = Block(stretch, at, parent)
            if parent is None:
                self._add_root(block)
            elif parent.children is None:
                parent.children = block
            else:
                parent.add_child(block)
            made.append(block)
            parent = block
        return made

    @staticmethod
    def _stretch(namespace: Namespace, parent: Block | None, packed: bytes) -> tuple[Stretch, int]:
        """Where new blocks are to be: a stretch that has their hashes, and the first one's position in it."""
        if parent is None:
            return Stretch(namespace, 0, packed), 0
        stretch, at = parent.stretch, parent.at + 1
        if len(stretch.hashes) == at * HASH_BYTES and at < LONG_STRETCH:
            stretch.hashes += packed
            return stretch, at
        return Stretch(namespace, parent.index + 1, packed), 0

    def drop(self, block: Block | None) -> None:
        """Forget the block and its ancestors, up to the first that has a name or another descendant."""
        while block is not None and not block.names and block.children is None:
            parent = block.parent
            if parent is not None:
                parent.remove_child(block)
            else:
                self._drop_root(block)
            block = parent

    def _add_root(self, block: Block) -> None:
        namespace = block.namespace
        if not namespace.roots:
            self.namespaces[namespace.adapter, namespace.salt] = namespace
            self._namespaces_of[namespace.scope_id] = self._namespaces_of.get(namespace.scope_id, 0) + 1
        namespace.roots[block.sequence_hash] = block

    def _drop_root(self, block: Block) -> None:
        namespace = block.namespace
        del namespace.roots[block.sequence_hash]
        if not namespace.roots:
            del self.namespaces[namespace.adapter, namespace.salt]
            self._namespaces_of[namespace.scope_id] -= 1
            if not self._namespaces_of[namespace.scope_id]:
                del self._namespaces_of[namespace.scope_id]
                self._maybe_unused.add(namespace.scope_id)

    def forget_unused_scopes(self) -> None:
        """Drop the scopes without blocks. Called after all events that name them were published."""
        for scope_id in self._maybe_unused:
            if scope_id not in self._namespaces_of:
                self.uses.pop(scope_id, None)
        self._maybe_unused.clear()

    # ---------------------------------------------------------------- names

    def add_name(self, name: EngineHash, block: Block) -> None:
        """`name`, unknown so far, stands for `block` from now on."""
        self.known[name] = block
        if self.variants.detached.pop(name, None) is not None:
            self.variants.touch((name,))
            return  # it counts already
        block.names += 1
        if block.names == 1:
            block.first_name = name
        else:
            self.variants.add(name, block)

    def add_first_names(self, names: Sequence[EngineHash], blocks: Sequence[Block]) -> None:
        """The names, unknown so far, stand for these blocks, which had none."""
        self.known.update(zip(names, blocks, strict=True))
        for name, block in zip(names, blocks, strict=True):
            block.names = 1
            block.first_name = name

    def share_name(self, name: EngineHash, block: Block) -> None:
        """`name` stands for `block` too, besides the block that it is known for."""
        self._others.setdefault(name, []).append(block)
        block.names += 1
        if block.names == 1:
            block.first_name = name

    def find(self, name: EngineHash, event: EngineStored) -> Block | None:
        """The block that the event means by `name`, its parent's or one of its own; None if it is not known in the event's
        namespace."""
        block = self.known.get(name)
        if block is None:
            return None
        any_salt = event.salt is None and event.salt_inherited
        others = self._others.get(name)
        for one in (block,) if others is None else (block, *others):
            namespace = one.namespace
            if namespace.adapter == event.adapter and (any_salt or namespace.salt == event.salt):
                return one
        return None

    def mark_evicted(self, names: Iterable[EngineHash]) -> None:
        """No tier holds the hashes any more."""
        evicted = self.evicted
        for name in names:
            evicted[name] = None
            if self.variants.children_of:
                self.variants.touch((name,))

    def mark_held(self, name: EngineHash) -> None:
        """A tier holds the hash."""
        self.evicted.pop(name, None)
        if self.variants.children_of:
            self.variants.touch((name,))

    def trim(self, capacity: int) -> tuple[dict[EngineHash, Block], list[Block]]:
        """Forget the hashes evicted first, down to `capacity`. Returns them with the blocks that they were known for, and all
        blocks that lost a hash."""
        forgotten: dict[EngineHash, Block] = {}
        lost: list[Block] = []
        while len(self.evicted) > capacity:
            name, _ = self.evicted.popitem(last=False)
            block = forgotten[name] = self.known.pop(name)
            blocks = (block, *self._others.pop(name, ()), *self.variants.forget(name, block))
            self._remove_name(blocks)
            lost += blocks
        return forgotten, lost

    def _remove_name(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.names -= 1
            self.drop(block)
