"""Names of blocks: a sequence hash, a key, or an engine's own hash."""

from dataclasses import dataclass
from typing import TypeAlias

from kvatlas.blocks.external_chain import ROOT, external_chain, is_hash_text
from kvatlas.blocks.residency import BlockKey
from kvatlas.errors import InvalidValue
from kvatlas.identity import OWN_CHAIN, Scope


@dataclass(frozen=True, slots=True)
class NameInEngine:
    """An engine's own hash of a block, as users write it: decimal, hex digits, or text."""

    text: str


BlockName: TypeAlias = int | BlockKey | NameInEngine
"""An integer is taken to be a sequence hash."""


def sequence_hash_of(key: BlockKey) -> int | None:
    """The sequence hash of a key's block, if the key contains it. In our own chain, that is the block hash; in an engine's
    chain, only the name of a first block yields one. Raises InvalidValue for a block hash that can't belong to our own
    chain."""
    if key.scope.chain == OWN_CHAIN:
        return read_sequence_hash(key.block_hash)
    if key.block_index:
        return None
    return int.from_bytes(external_chain([key.block_hash], key.prefix_hash), "little")


def needs_publishers(name: BlockName | None) -> bool:
    """True if only publishers know which block is meant."""
    return isinstance(name, NameInEngine) or (isinstance(name, BlockKey) and sequence_hash_of(name) is None)


def said_sequence_hash(block: int | BlockKey) -> int:
    """The sequence hash in a hash or key. Raises InvalidValue for a key that does not contain one."""
    value = block if isinstance(block, int) else sequence_hash_of(block)
    if value is None:
        assert isinstance(block, BlockKey)
        raise InvalidValue(
            f"block {block.block_hash!r:.80} after {block.prefix_hash!r:.80}: only publishers know which it is"
        )
    return value


def read_block_name(
    scope: Scope, block_hash: str | None, prefix: str | None, engine_hash: str | None
) -> BlockName | None:
    """Read a block's name from a command or query: either its hash (with `prefix`, its key) or an engine's own hash. Returns
    None if neither is given. Raises InvalidValue if both are."""
    if engine_hash is not None:
        if block_hash is not None or prefix is not None:
            raise InvalidValue("a block is named by an engine's hash and by another; expected one of the two")
        return NameInEngine(engine_hash)
    if block_hash is None:
        if prefix is not None:
            raise InvalidValue(f"prefix {prefix!r:.80} without the hash of a block; expected both")
        return None
    if prefix is not None:
        return BlockKey(scope, prefix, block_hash, int(prefix != ROOT), 0)
    return read_sequence_hash(block_hash)


def read_sequence_hash(text: str) -> int:
    """Read a number that is written as 16 hex digits. Raises InvalidValue."""
    if not is_hash_text(text):
        raise InvalidValue(f"sequence hash {text!r:.80}; expected 16 hex digits, as `kvatlas export` prints them")
    return int(text, 16)
