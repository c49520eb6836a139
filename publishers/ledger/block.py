"""A block of a chain, and the namespace that its chain belongs to. What blocks of one event have in common, they share: a
ledger has them by the million. Only the ledger's own parts change them:

names, children            lineage
copies                     residency, shared_hashes
usable                     prefix_closure
held_by                    sparse_holdings
runs                       marks
"""

from collections.abc import Iterable, Iterator

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.events import EngineHash

COPIES_BITS = 24
"""`Block.copies` has a field of this many bits for each tier, the device tier lowest: usually one small integer."""
COPIES_FIELD = (1 << COPIES_BITS) - 1

ORPHAN = -1
"""`Block.usable` of a block that is held while one of its ancestors is not."""


class Namespace:
    """The chains of one (adapter, salt): the same tokens at a root are another block in another namespace.

    `root_salt` is the salt if it is hashed into the first block (not mapped to the tenant), else None.
    """

    __slots__ = ("adapter", "root_salt", "roots", "salt", "scope_id")

    def __init__(self, scope_id: bytes, adapter: str | None, salt: str | None, root_salt: str | None) -> None:
        self.scope_id = scope_id
        self.adapter = adapter
        self.salt = salt
        self.root_salt = root_salt
        self.roots: dict[bytes, Block] = {}
        """The first blocks of its chains, by packed sequence hash."""

    def blocks(self) -> Iterator["Block"]:
        """All of its blocks, parents before children, each chain as far as it goes before the next branch."""
        waiting = list(self.roots.values())
        while waiting:
            block = waiting.pop()
            yield block
            waiting.extend(block.iter_children())


class Stretch:
    """Consecutive blocks of one chain that were made together. `hashes`: their packed sequence hashes."""

    __slots__ = ("first_index", "hashes", "namespace")

    def __init__(self, namespace: Namespace, first_index: int, hashes: bytes) -> None:
        self.namespace = namespace
        self.first_index = first_index
        self.hashes = hashes


class Block:
    """One block of a chain: the one at position `at` of its stretch.

    `copies`: how many engine hashes hold it, by tier (see COPIES_BITS). `usable`: flags of the tiers it is usable in, 0
    if it is not held, ORPHAN if it is held behind a hole. `names`: how many engine hashes stand for it, `first_name` one of
    them. `held_by`: a bit for each group besides full attention that holds it, in any tier; `runs`: see `marks`.
    """

    __slots__ = ("at", "children", "copies", "first_name", "held_by", "names", "parent", "runs", "stretch", "usable")

    def __init__(self, stretch: Stretch, at: int, parent: "Block | None") -> None:
        self.stretch = stretch
        self.at = at
        self.parent = parent
        self.children: Block | dict[bytes, Block] | None = None  # most blocks have one child: no container for it
        self.copies = 0
        self.usable = 0
        self.names = 0
        self.first_name: EngineHash = 0
        self.held_by = 0
        self.runs = 0

    @property
    def namespace(self) -> Namespace:
        return self.stretch.namespace

    @property
    def index(self) -> int:
        return self.stretch.first_index + self.at

    @property
    def sequence_hash(self) -> bytes:
        """Packed."""
        at = self.at * HASH_BYTES
        return self.stretch.hashes[at : at + HASH_BYTES]

    def child(self, sequence_hash: bytes) -> "Block | None":
        """The child with this packed sequence hash."""
        children = self.children
        if isinstance(children, dict):
            return children.get(sequence_hash)
        return children if children is not None and children.sequence_hash == sequence_hash else None

    def iter_children(self) -> Iterator["Block"]:
        children = self.children
        if children is not None:
            if isinstance(children, Block):
                yield children
            else:
                yield from children.values()

    def add_child(self, child: "Block") -> None:
        children = self.children
        if children is None:
            self.children = child
        elif isinstance(children, Block):
            self.children = {children.sequence_hash: children, child.sequence_hash: child}
        else:
            children[child.sequence_hash] = child

    def remove_child(self, child: "Block") -> None:
        children = self.children
        if isinstance(children, dict):
            del children[child.sequence_hash]
            if not children:
                self.children = None
        else:
            self.children = None


def packed_hashes(blocks: Iterable[Block]) -> bytes:
    """The blocks' sequence hashes; neighbours are copied together."""
    parts: list[bytes] = []
    stretch: Stretch | None = None
    first = end = 0
    for block in blocks:
        if block.at != end or block.stretch is not stretch:
            if stretch is not None:
                parts.append(stretch.hashes[first * HASH_BYTES : end * HASH_BYTES])
            stretch, first = block.stretch, block.at
            end = first
        end += 1
    if stretch is not None:
        parts.append(stretch.hashes[first * HASH_BYTES : end * HASH_BYTES])
    return b"".join(parts)


def tiers_held(copies: int) -> int:
    """Flags of the tiers that `Block.copies` has a copy in."""
    flags, flag = 0, 1
    while copies:
        if copies & COPIES_FIELD:
            flags |= flag
        copies >>= COPIES_BITS
        flag <<= 1
    return flags
