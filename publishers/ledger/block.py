"""Blocks of a chain, and the namespace that a chain belongs to.

A ledger has millions of blocks, and most neighbors in a chain differ only in their hashes. So they share one record, a
**stretch**. Any operation that makes a block differ cuts it out first. Only these parts of the ledger change a stretch:

names, children            lineage
copies                     residency, shared_hashes
usable                     prefix_closure
held_by                    sparse_holdings
runs                       marks
"""

from collections.abc import Iterable, Iterator
from typing import NewType

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.identity import OWN_CHAIN
from kvatlas_publishers.engine_events import EngineHash

COPIES_BITS = 24
"""`Stretch.copies` has a field of this many bits for each tier, the device tier lowest: usually one small integer."""
COPIES_FIELD = (1 << COPIES_BITS) - 1

ORPHAN = -1
"""The value of `Stretch.usable` for blocks that are held although one of their ancestors is not."""


class Namespace:
    """The chains of one (adapter, salt, kind of chain). The same root tokens are a different block in each namespace.

    `root_salt` is the salt if it is hashed into the first block (not mapped to the tenant), otherwise None.
    """

    __slots__ = ("adapter", "chain", "root_salt", "roots", "salt", "scope_id")

    def __init__(
        self, scope_id: bytes, adapter: str | None, salt: str | None, root_salt: str | None, chain: str = OWN_CHAIN
    ) -> None:
        self.scope_id = scope_id
        self.adapter = adapter
        self.salt = salt
        self.root_salt = root_salt
        self.chain = chain
        self.roots: dict[bytes, Stretch] = {}
        """The first stretch of each chain, by its first packed sequence hash."""

    def stretches(self) -> Iterator["Stretch"]:
        """All blocks of the namespace, depth first, parents before children."""
        waiting = list(self.roots.values())
        while waiting:
            stretch = waiting.pop()
            yield stretch
            waiting.extend(stretch.iter_children())


class Stretch:
    """Consecutive blocks of one chain. The fields about a block apply to each of them.

    `index`: the first block's place in the chain. `hashes`: the packed sequence hashes. `children`: the stretches after the
    last block. `copies`: number of engine hashes that hold a block, by tier (see COPIES_BITS). `usable`: flags of the tiers in
    which a block is usable; 0 if it is not held; ORPHAN if it is held after a hole. `named`: the number of engine hashes that
    a block has.

    `plain`: each block has exactly one engine hash, in `names`. The device tier has one copy of it or none, not counted
    anywhere else, and no other tier has a copy. A stretch that is not plain is a `Block`.
    """

    __slots__ = (
        "children",
        "copies",
        "hashes",
        "held_by",
        "index",
        "named",
        "names",
        "namespace",
        "parent",
        "plain",
        "runs",
        "usable",
    )

    def __init__(
        self,
        namespace: Namespace,
        index: int,
        hashes: bytes,
        parent: "Stretch | None",
        names: tuple[EngineHash, ...] = (),
        copies: int = 0,
    ) -> None:
        """`names`: given for a plain stretch."""
        self.namespace = namespace
        self.index = index
        self.hashes = hashes
        self.parent = parent
        self.children: Stretch | dict[bytes, Stretch] | None = None  # most have one child: no container for it
        self.names = names
        self.named = 1 if names else 0
        self.plain = bool(names)
        self.copies = copies
        self.usable = 0
        self.held_by = 0
        self.runs = 0

    def __len__(self) -> int:
        """The number of blocks."""
        return len(self.hashes) // HASH_BYTES

    @property
    def sequence_hash(self) -> bytes:
        """The first block's packed sequence hash."""
        return self.hashes[:HASH_BYTES]

    def child(self, sequence_hash: bytes) -> "Stretch | None":
        """The child that begins with this packed sequence hash."""
        children = self.children
        if isinstance(children, dict):
            return children.get(sequence_hash)
        return children if children is not None and children.hashes[:HASH_BYTES] == sequence_hash else None

    def iter_children(self) -> Iterator["Stretch"]:
        children = self.children
        if children is not None:
            if isinstance(children, Stretch):
                yield children
            else:
                yield from children.values()

    def add_child(self, child: "Stretch") -> None:
        children = self.children
        if children is None:
            self.children = child
        elif isinstance(children, Stretch):
            self.children = {children.sequence_hash: children, child.sequence_hash: child}
        else:
            children[child.sequence_hash] = child

    def remove_child(self, child: "Stretch") -> None:
        children = self.children
        if isinstance(children, dict):
            del children[child.sequence_hash]
            if not children:
                self.children = None
        else:
            self.children = None

    def cut(self, at: int) -> "Stretch":
        """Cut a plain stretch before its block number `at`, which is not the first. This stretch keeps the first part; returns
        the second."""
        end = at * HASH_BYTES
        rest = Stretch(self.namespace, self.index + at, self.hashes[end:], self, self.names[at:], self.copies)
        rest.usable = self.usable
        rest._take_children_of(self)
        self.hashes, self.names, self.children = self.hashes[:end], self.names[:at], rest
        return rest

    def absorb(self, child: "Stretch") -> None:
        """Append the blocks of the only child, which is plain like this stretch."""
        self.hashes += child.hashes
        self.names += child.names
        self._take_children_of(child)

    def _take_children_of(self, other: "Stretch") -> None:
        self.children = other.children
        for child in self.iter_children():
            child.parent = self


Block = NewType("Block", Stretch)
"""A stretch of one block that is not plain: its copies are counted by name in the holdings, it may have any number of engine
hashes, and `names` holds one of them or is empty."""


def packed_hashes(stretches: Iterable[Stretch]) -> bytes:
    """The blocks' sequence hashes, in this order."""
    return b"".join([stretch.hashes for stretch in stretches])


def reversed_hashes(packed: bytes) -> bytes:
    """The packed hashes in reverse order."""
    if len(packed) == HASH_BYTES:
        return packed
    return memoryview(packed).cast("Q")[::-1].tobytes()


def tiers_held(copies: int) -> int:
    """The flags of the tiers in which `Stretch.copies` counts a copy."""
    flags, flag = 0, 1
    while copies:
        if copies & COPIES_FIELD:
            flags |= flag
        copies >>= COPIES_BITS
        flag <<= 1
    return flags
