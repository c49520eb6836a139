"""What the store's values and answers mean, as this package's types."""

from collections.abc import Iterator
from struct import iter_unpack

from kvatlas.blocks.residency import HOLDER_ENTRY_BYTES
from kvatlas.index.holder_entries import NUMBER_BYTES

_TOUCHED = ">8sII"


def scopes_touched(packed: bytes | None) -> dict[bytes, tuple[int, int]]:
    """The scopes that a holder has used: scope id -> (block size, block bytes)."""
    return {scope_id: (size, block_bytes) for scope_id, size, block_bytes in iter_unpack(_TOUCHED, packed or b"")}


def blocks_in(value: bytes) -> Iterator[tuple[bytes, int]]:
    """(holder's 3-byte number, flags) of each entry of a holders value."""
    for at in range(0, len(value), HOLDER_ENTRY_BYTES):
        yield value[at : at + NUMBER_BYTES], value[at + NUMBER_BYTES]
