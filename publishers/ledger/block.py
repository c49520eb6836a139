"""Blocks of a chain, and the namespace that a chain belongs to.

A ledger has blocks by the million, and most of a chain's neighbours have all in common but their hashes. So they are one
record, a **stretch**, for as long as they do; what makes one of them different cuts it out first. Only the ledger's own parts
change a stretch:

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
"""`Stretch.usable` of blocks that are held while one of their ancestors is not."""


class Namespace:
    """The chains of one (adapter, salt, kind of chain): the same tokens at a root are another block in another namespace.

    `root_salt` is the salt if it is hashed into the first block (not mapped to the tenant), else None.
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
        """The beginnings of its chains, by their first packed sequence hash."""

    def stretches(self) -> Iterator["Stretch"]:
        """All of its blocks, parents before children, each chain as far as it goes before the next branch."""
        waiting = list(self.roots.values())
        while waiting:
            stretch = waiting.pop()
            yield stretch
            waiting.extend(stretch.iter_children())


class Stretch:
    """Consecutive blocks of one chain. What is said of blocks is true of each of them.

    `index`: the first block's place in the chain. `hashes`: the packed sequence hashes. `children`: what follows the last
    block. `copies`: how many engine hashes hold a block, by tier (see COPIES_BITS). `usable`: flags of the tiers it is usable
    in, 0 if it is not held, ORPHAN if it is held behind a hole. `named`: how many engine hashes stand for it.

    `plain`: one engine hash stands for each block, `names` has them, and the device tier has one copy of it or none, of which
    no count is kept elsewhere; nor is there any copy in another tier. Else it is a `Block`.
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
        """With `names` it is plain."""
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
        """Its blocks."""
        return len(self.hashes) // HASH_BYTES

    @property
    def sequence_hash(self) -> bytes:
        """The first block's, packed."""
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
        """Cut a plain one before its block number `at`, which is not the first. This is the part before from now on; returns
        the other one."""
        end = at * HASH_BYTES
        rest = Stretch(self.namespace, self.index + at, self.hashes[end:], self, self.names[at:], self.copies)
        rest.usable = self.usable
        rest._take_children_of(self)
        self.hashes, self.names, self.children = self.hashes[:end], self.names[:at], rest
        return rest

    def absorb(self, child: "Stretch") -> None:
        """Go on with the blocks of the only child, a plain one like this."""
        self.hashes += child.hashes
        self.names += child.names
        self._take_children_of(child)

    def _take_children_of(self, other: "Stretch") -> None:
        self.children = other.children
        for child in self.iter_children():
            child.parent = self


Block = NewType("Block", Stretch)
"""A stretch of one block that is not plain: its copies are counted by name in the holdings, any number of engine hashes may
stand for it, and `names` has one of these, or is empty."""


def packed_hashes(stretches: Iterable[Stretch]) -> bytes:
    """The blocks' sequence hashes, in this order."""
    return b"".join([stretch.hashes for stretch in stretches])


def reversed_hashes(packed: bytes) -> bytes:
    """The packed hashes, the last one first."""
    if len(packed) == HASH_BYTES:
        return packed
    return memoryview(packed).cast("Q")[::-1].tobytes()


def tiers_held(copies: int) -> int:
    """Flags of the tiers that `Stretch.copies` has a copy in."""
    flags, flag = 0, 1
    while copies:
        if copies & COPIES_FIELD:
            flags |= flag
        copies >>= COPIES_BITS
        flag <<= 1
    return flags
