"""A block of a chain, and the namespace that its chain belongs to. Only the ledger's own parts change them:

names, children            lineage
copies                     residency, shared_hashes
usable                     prefix_closure
held_by                    sparse_holdings
runs                       marks
"""

from collections.abc import Iterator

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

    __slots__ = ("adapter", "blocks", "root_salt", "salt", "scope_id")

    def __init__(self, scope_id: bytes, adapter: str | None, salt: str | None, root_salt: str | None) -> None:
        self.scope_id = scope_id
        self.adapter = adapter
        self.salt = salt
        self.root_salt = root_salt
        self.blocks: dict[bytes, Block] = {}
        """By packed sequence hash, parents before children."""


class Block:
    """One block of a chain.

    `copies`: how many engine hashes hold it, by tier (see COPIES_BITS). `usable`: flags of the tiers it is usable in, 0
    if it is not held, ORPHAN if it is held behind a hole. `names`: how many engine hashes stand for it, `first_name` one of
    them. `held_by`: a bit for each group besides full attention that holds it, in any tier; `runs`: see `marks`.
    """

    __slots__ = (
        "children",
        "copies",
        "first_name",
        "held_by",
        "index",
        "names",
        "namespace",
        "parent",
        "runs",
        "sequence_hash",
        "usable",
    )

    def __init__(self, namespace: Namespace, sequence_hash: bytes, parent: "Block | None", index: int) -> None:
        self.namespace = namespace
        self.sequence_hash = sequence_hash
        self.parent = parent
        self.index = index
        self.children: Block | dict[Block, None] | None = None  # most blocks have one child: no container for it
        self.copies = 0
        self.usable = 0
        self.names = 0
        self.first_name: EngineHash = 0
        self.held_by = 0
        self.runs = 0

    def iter_children(self) -> Iterator["Block"]:
        children = self.children
        if children is not None:
            if isinstance(children, Block):
                yield children
            else:
                yield from children

    def add_child(self, child: "Block") -> None:
        children = self.children
        if children is None:
            self.children = child
        elif isinstance(children, Block):
            self.children = {children: None, child: None}
        else:
            children[child] = None

    def remove_child(self, child: "Block") -> None:
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
        if copies & COPIES_FIELD:
            flags |= flag
        copies >>= COPIES_BITS
        flag <<= 1
    return flags
