"""Which chain each of an engine's blocks belongs to: engine hash -> block (scope, sequence hash, parent, index).

An engine names blocks by hashes of its own. The ledger computes the sequence hash when a block is first stored, and
remembers it after the block is evicted (bounded, first evicted first forgotten), so that a child that is stored late
still finds its parent's chain. A block that nobody names any more stays only while blocks that are named descend from it.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvatlas.events import EngineHash, EngineStored, ScopeUse
from kvatlas.identity import Scope
from publishers.ledger.awaiting_parent import Unplaced

if TYPE_CHECKING:
    from publishers.ledger.shared_hashes import TwinCopies

COPIES_BITS = 24
"""`Block.copies` has a field of this many bits for each tier, the device tier lowest: one small integer as a rule."""
FIELD = (1 << COPIES_BITS) - 1

ORPHAN = -1
"""`Block.told` of a block that is held while one of its ancestors is not."""


class Namespace:
    """The chains of one (adapter, salt): a root's tokens mean another block in another namespace.

    `root_salt` is the salt where it is hashed into the first block (not mapped to the tenant), else None.
    """

    __slots__ = ("adapter", "blocks", "root_salt", "salt", "scope_id")

    def __init__(self, scope_id: bytes, adapter: str | None, salt: str | None, root_salt: str | None) -> None:
        self.scope_id = scope_id
        self.adapter = adapter
        self.salt = salt
        self.root_salt = root_salt
        self.blocks: dict[bytes, Block] = {}


class Block:
    """One block of a chain. Mutable, and only within the ledger.

    `copies`: engine blocks that hold it, by tier (see COPIES_BITS). `told`: flags of the tiers it is usable in, 0 when it
    is not held, ORPHAN when it is held behind a hole. `names`: how many engine hashes stand for it.
    """

    __slots__ = (
        "children",
        "copies",
        "index",
        "names",
        "namespace",
        "parent",
        "sequence_hash",
        "told",
        "touched",
    )

    def __init__(self, namespace: Namespace, sequence_hash: bytes, parent: "Block | None", index: int) -> None:
        self.namespace = namespace
        self.sequence_hash = sequence_hash
        self.parent = parent
        self.index = index
        self.children: Block | dict[Block, None] | None = None  # most blocks have one child: no container for it
        self.copies = 0
        self.told = 0
        self.touched = False
        self.names = 0

    def each_child(self) -> Iterator["Block"]:
        children = self.children
        if children is not None:
            if isinstance(children, Block):
                yield children
            else:
                yield from children

    def adopt(self, child: "Block") -> None:
        children = self.children
        if children is None:
            self.children = child
        elif isinstance(children, Block):
            self.children = {children: None, child: None}
        else:
            children[child] = None

    def disown(self, child: "Block") -> None:
        children = self.children
        if isinstance(children, dict):
            del children[child]
            if not children:
                self.children = None
        else:
            self.children = None


def tiers_held(copies: int) -> int:
    """Flags of the tiers that `Block.copies` has a copy in."""
    flags, flag = 0, 1
    while copies:
        if copies & FIELD:
            flags |= flag
        copies >>= COPIES_BITS
        flag <<= 1
    return flags


class Lineages:
    """Engine hashes and the blocks they stand for. Decides nothing of residency.

    `twins` has the engine hashes that stand for more than one block (an engine that leaves the salt or the adapter out of
    its hashes); `known` has the first of those. `evicted` are the known hashes that no tier holds, in that order; `unplaced`
    the stores behind a hash that is not known.
    """

    def __init__(
        self, model_id: str, tokenizer_id: str, tenant_id: str, block_bytes: int, salt_is_tenant: bool
    ) -> None:
        self._model_id, self._tokenizer_id, self._tenant_id = model_id, tokenizer_id, tenant_id
        self._block_bytes = block_bytes
        self._salt_is_tenant = salt_is_tenant
        self.namespaces: dict[tuple[str | None, str | None], Namespace] = {}
        self.uses: dict[bytes, ScopeUse] = {}
        """Of every scope that has blocks, and of those that had some since `forget_unused` was called."""
        self._namespaces_of: dict[bytes, int] = {}
        self._perhaps_unused: set[bytes] = set()
        self.known: dict[EngineHash, Block] = {}
        self.unplaced = Unplaced()
        self.twins: dict[EngineHash, dict[Block, TwinCopies]] = {}
        self.evicted: OrderedDict[EngineHash, None] = (
            OrderedDict()
        )  # a dict's first key is slow to find again and again

    def namespace(self, adapter: str | None, salt: str | None, block_size: int) -> Namespace:
        """The namespace of a root's chain; kept only while it has blocks, since each request may bring a salt of its own.

        Raises InvalidValue where adapter or salt can't be a scope's field.
        """
        found = self.namespaces.get((adapter, salt))
        if found is None:
            mapped = self._salt_is_tenant and salt is not None
            tenant_id = salt if self._salt_is_tenant and salt is not None else self._tenant_id
            scope = Scope(self._model_id, self._tokenizer_id, adapter, tenant_id)
            found = Namespace(scope.scope_id, adapter, salt, None if mapped else salt)
            self.uses[scope.scope_id] = ScopeUse(scope, block_size, self._block_bytes)
            self._perhaps_unused.add(scope.scope_id)
        return found

    def forget_unused(self) -> None:
        """Drop the scopes that have no blocks: when all events that name them were told."""
        for scope_id in self._perhaps_unused:
            if scope_id not in self._namespaces_of:
                self.uses.pop(scope_id, None)
        self._perhaps_unused.clear()

    def meant(self, name: EngineHash, event: EngineStored) -> Block | None:
        """The block that the event means by `name`, its parent's or one of its own; None where it is not known in the
        event's namespace."""
        block = self.known.get(name)
        if block is None:
            return None
        any_salt = event.salt is None and event.salt_inherited
        for one in self.twins.get(name, (block,)):
            namespace = one.namespace
            if namespace.adapter == event.adapter and (any_salt or namespace.salt == event.salt):
                return one
        return None

    def chain(self, namespace: Namespace, parent: Block | None, packed: bytes) -> list[Block]:
        """The blocks of packed sequence hashes that go on from `parent`; made where there is none yet."""
        blocks = namespace.blocks
        if not blocks:
            self.namespaces[namespace.adapter, namespace.salt] = namespace
            self._namespaces_of[namespace.scope_id] = self._namespaces_of.get(namespace.scope_id, 0) + 1
        index = 0 if parent is None else parent.index + 1
        found: list[Block] = []
        for at in range(0, len(packed), 8):
            sequence_hash = packed[at : at + 8]
            block = blocks.get(sequence_hash)
            if block is None:
                block = blocks[sequence_hash] = Block(namespace, sequence_hash, parent, index)
                if parent is not None:
                    if parent.children is None:
                        parent.children = block
                    else:
                        parent.adopt(block)
            found.append(block)
            parent = block
            index += 1
        return found

    def trim(self, capacity: int) -> int:
        """Forget the hashes evicted first, down to `capacity`; returns how many."""
        forgotten = 0
        while len(self.evicted) > capacity:
            name, _ = self.evicted.popitem(last=False)
            owner = self.known.pop(name)
            blocks = tuple(self.twins.pop(name, (owner,)))
            for block in blocks:
                block.names -= 1
                self.drop(block)
            forgotten += 1
        return forgotten

    def drop(self, block: Block | None) -> None:
        """Forget the block, and those above it, as far as nobody names them and nothing descends from them."""
        while block is not None and not block.names and block.children is None:
            namespace = block.namespace
            del namespace.blocks[block.sequence_hash]
            if not namespace.blocks:
                del self.namespaces[namespace.adapter, namespace.salt]
                self._namespaces_of[namespace.scope_id] -= 1
                if not self._namespaces_of[namespace.scope_id]:
                    del self._namespaces_of[namespace.scope_id]
                    self._perhaps_unused.add(namespace.scope_id)
            parent = block.parent
            if parent is not None:
                parent.disown(block)
            block = parent
