"""Looks up the blocks of an engine hash, and the engine hashes of a block, for requests about single blocks.

A lookup by block searches the whole ledger. Batches don't pass through this module.
"""

from collections.abc import Sequence

from kvatlas.blocks.hashing import HASH_BYTES, pack_hashes
from kvatlas.bus.control import NamedBlock, ScopeFields
from kvatlas_publishers.engine_events import EngineHash
from kvatlas_publishers.ledger.block import Stretch
from kvatlas_publishers.ledger.lineage import Lineage


def engine_hashes_of(text: str) -> list[EngineHash]:
    """The engine hashes that a user's text may stand for: a 64-bit number (decimal, or 16 hex digits), the bytes of hex
    digits, or the text itself."""
    found: list[EngineHash] = [text.encode()]
    digits = text.removeprefix("0x").removeprefix("-")
    if digits.isdecimal() and not text.startswith("0x") and len(digits) <= 20:
        found.append(int(text) & ((1 << 64) - 1))
    try:
        packed = bytes.fromhex(text.removeprefix("0x"))
    except ValueError:
        return found
    return [*found, int.from_bytes(packed, "big") if len(packed) == HASH_BYTES else packed]


def blocks_named(lineage: Lineage, text: str) -> list[NamedBlock]:
    """The blocks with this engine hash, in any scope; empty if the hash is unknown."""
    found = []
    for name in engine_hashes_of(text):
        for stretch in lineage.stretches_named(name):
            at = stretch.names.index(name) if stretch.plain else 0
            found.append(_describe(lineage, stretch, at))
    return found


def names_of(lineage: Lineage, block: NamedBlock) -> list[EngineHash]:
    packed, scope_id = block.sequence_hash.to_bytes(HASH_BYTES, "little"), block.scope.scope_id
    names: list[EngineHash] = []
    for namespace in lineage.namespaces.values():
        if namespace.scope_id != scope_id:
            continue
        for stretch in namespace.stretches():
            at = _place_of(stretch, packed)
            if at is not None:
                names += [stretch.names[at]] if stretch.plain else lineage.names_of(stretch)
    return names


def hashes_along(lineage: Lineage, scope_id: bytes, sequence_hashes: Sequence[int]) -> list[int]:
    """The engine's own hashes of a chain's first blocks, up to the first block that the engine does not hold or whose hash
    is not a number."""
    chain = pack_hashes(sequence_hashes)
    first = chain[:HASH_BYTES]
    roots = (one.roots.get(first) for one in lineage.namespaces.values() if one.scope_id == scope_id)
    stretch = next((root for root in roots if root is not None), None)
    found: list[int] = []
    while stretch is not None and stretch.usable > 0:
        rest = chain[len(found) * HASH_BYTES :]
        common = _common_blocks(stretch.hashes, rest)
        for name in stretch.names[:common]:
            if not isinstance(name, int):
                return found
            found.append(name)
        if common < len(stretch) or not stretch.names:
            break
        stretch = stretch.child(rest[common * HASH_BYTES : (common + 1) * HASH_BYTES])
    return found


def _common_blocks(one: bytes, other: bytes) -> int:
    """The number of equal hashes at the start. If two hashes are equal, so are all before them."""
    low, high = 0, min(len(one), len(other)) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        place = slice((middle - 1) * HASH_BYTES, middle * HASH_BYTES)
        low, high = (middle, high) if one[place] == other[place] else (low, middle - 1)
    return low


def _place_of(stretch: Stretch, packed: bytes) -> int | None:
    at = stretch.hashes.find(packed)
    while at >= 0 and at % HASH_BYTES:
        at = stretch.hashes.find(packed, at + 1)
    return at // HASH_BYTES if at >= 0 else None


def _describe(lineage: Lineage, stretch: Stretch, at: int) -> NamedBlock:
    hashes: Sequence[bytes] = [
        stretch.hashes[place * HASH_BYTES : (place + 1) * HASH_BYTES] for place in (at - 1, at) if place >= 0
    ]
    before = hashes[0] if at else (stretch.parent.hashes[-HASH_BYTES:] if stretch.parent is not None else None)
    return NamedBlock(
        **ScopeFields.fields_of(lineage.uses[stretch.namespace.scope_id].scope),
        sequence_hash=int.from_bytes(hashes[-1], "little"),
        parent=None if before is None else int.from_bytes(before, "little"),
    )
