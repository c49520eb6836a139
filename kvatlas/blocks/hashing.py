"""The hash chain that keys KV blocks: engine-neutral, computed from token ids alone.

    local[i] = XXH3_64(tokens of block i as little-endian u32 [+ msgpack of the block's extra keys], seed 1337)
    seq[0] = local[0];  seq[i] = XXH3_64(LE64(seq[i-1]) + LE64(local[i]), seed 1337)

Equal to NVIDIA Dynamo's chain for plain blocks. Only full blocks have a hash. Hashes travel packed: 8 little-endian
bytes each, so 512 blocks are one `bytes` of 4,096.

The extra keys of a block are a list, in this order; a block without any is plain:

1. `[id, offset]` for each multimodal item that touches the block, in prompt order: the item's identifier (vLLM: its content
   hash), and its offset from the block's first token, negative if the item began in an earlier block. For vLLM versions that
   write no offset: the identifier alone, as text.
2. in the first block of a prompt: the cache salt, as text, unless salts are mapped to tenants.
3. the digest of the block's prompt embeddings, as bytes.

Some engines' hashes also cover the L tokens after a block (vLLM 0.33 with EAGLE: lookahead). In that case, their chain starts
at token L, and the parent of its first block is the local hash of the first L tokens. A block's hash then covers the same
tokens as the engine's own hash does, and a block that is followed by fewer than L tokens has no hash.

The LoRA adapter is not among the extra keys; it is part of the scope. A router that knows a prompt's salt and items
computes the same hashes.

The chain of plain blocks is computed by `_hash_chain.c` if a C compiler was there when kvatlas was installed. The code here
computes the same, and all other chains.
"""

import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from struct import Struct
from typing import Any

import msgpack
from xxhash import xxh3_64_intdigest

from kvatlas.errors import InvalidValue

_extend_compiled: Callable[[object, int, int | None], bytes | None] | None
"""Computes what `extend_chain` does for plain blocks, and returns None for any input that is not an ordinary one."""
try:
    from kvatlas.blocks._hash_chain import extend as _extend_compiled
except ImportError:
    _extend_compiled = None

SEED = 1337
HASH_BYTES = 8
MAX_TOKEN_ID = (1 << 32) - 1

ExtraKeys = Sequence[Any] | None
"""One block's extra keys (multimodal ids, cache salt), or None for a plain block."""

TokenIds = Sequence[int]

_PAIR = Struct("<QQ")
_COMPILED_TYPES = (list, array, tuple)
"""Subclasses and other sequence types may compute their items on access, so the Python code reads them."""


def is_compiled() -> bool:
    """True if chains of plain blocks are computed by compiled code."""
    return _extend_compiled is not None


def pack_tokens(tokens: TokenIds) -> bytes:
    """Token ids as little-endian u32. Raises InvalidValue for an id that is not an integer in 0..2^32-1."""
    if isinstance(tokens, (str, bytes, bytearray)):  # array() would read bytes as machine words
        raise InvalidValue(f"token ids given as {type(tokens).__name__}; expected a sequence of integers")
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        bad = next((t for t in tokens if not isinstance(t, int) or not 0 <= t <= MAX_TOKEN_ID), tokens)
        raise InvalidValue(f"token id {bad!r}; expected an integer from 0 to {MAX_TOKEN_ID}") from error
    if sys.byteorder == "big":
        packed = array("I", packed)
        packed.byteswap()
    return packed.tobytes()


def local_hash(tokens: TokenIds, extra_keys: ExtraKeys = None) -> int:
    """The 64-bit hash of one block's own tokens and extra keys."""
    return _local(pack_tokens(tokens), extra_keys)


def _local(packed_tokens: bytes, extra_keys: ExtraKeys) -> int:
    if extra_keys:
        packed_tokens += msgpack.packb(list(extra_keys))
    return xxh3_64_intdigest(packed_tokens, SEED)


def extend_chain(
    tokens: TokenIds,
    block_size: int,
    parent: int | None = None,
    extra_keys: Sequence[ExtraKeys] | None = None,
) -> bytes:
    """Packed sequence hashes of the full blocks of `tokens`; `parent` is the sequence hash of the block before them.

    `extra_keys` has one entry per block (if it is shorter, the remaining blocks are plain). A partial last block has no hash.
    Raises InvalidValue for a block size below 1 or a token id of more than 32 bits.
    """
    if block_size < 1:
        raise InvalidValue(f"block size {block_size}; expected at least 1")
    if extra_keys is not None and not any(extra_keys):
        extra_keys = None
    if _extend_compiled is not None and extra_keys is None and type(tokens) in _COMPILED_TYPES:
        chain = _extend_compiled(tokens, block_size, parent)
        if chain is not None:
            return chain
    count = len(tokens) // block_size
    packed = pack_tokens(tokens)
    if not count:
        return b""
    if len(tokens) % block_size:
        packed = packed[: count * block_size * 4]
    blocks = _block_of(4 * block_size).iter_unpack(packed)
    if extra_keys is not None:
        keys = [*extra_keys[:count], *[None] * (count - len(extra_keys))]
        return chain_of_local_hashes([_local(block, key) for (block,), key in zip(blocks, keys, strict=True)], parent)
    if parent is None:
        return chain_of_local_hashes([xxh3_64_intdigest(block, SEED) for (block,) in blocks])
    pack, digest = _PAIR.pack, xxh3_64_intdigest
    return pack_hashes([parent := digest(pack(parent, digest(block, SEED)), SEED) for (block,) in blocks])


def chain_of_local_hashes(local_hashes: Sequence[int], parent: int | None = None) -> bytes:
    """Packed sequence hashes of blocks, from their local hashes; `parent` is the sequence hash of the block before them."""
    values = iter(local_hashes)
    hashes: list[int] = []
    if parent is None:
        parent = next(values, None)
        if parent is None:
            return b""
        hashes.append(parent)
    pack = _PAIR.pack
    hashes += [parent := xxh3_64_intdigest(pack(parent, value), SEED) for value in values]
    return pack_hashes(hashes)


@lru_cache(maxsize=64)
def _block_of(size: int) -> Struct:
    """Cuts packed tokens into blocks of this many bytes."""
    return Struct(f"{size}s")


def lookahead_chain(tokens: TokenIds, lookahead_tokens: int) -> tuple[int | None, TokenIds]:
    """(parent of the first block, tokens of the blocks) for a chain whose hashes also cover `lookahead_tokens` tokens after
    each block."""
    if not lookahead_tokens:
        return None, tokens
    return local_hash(tokens[:lookahead_tokens]), tokens[lookahead_tokens:]


def lazy_chain(
    tokens: TokenIds,
    block_size: int,
    chunk_blocks: int,
    extra_keys: Sequence[ExtraKeys] | None = None,
    lookahead_tokens: int = 0,
) -> Iterator[bytes]:
    """The whole chain of a prompt in packed chunks of up to `chunk_blocks` blocks, each computed only when it is requested.

    A router stops as soon as no worker holds the current chunk, so a long cold prompt is hashed only as far as it matches.
    """
    parent, tokens = lookahead_chain(tokens, lookahead_tokens)
    blocks = len(tokens) // block_size
    for first in range(0, blocks, chunk_blocks):
        end = (first + chunk_blocks) * block_size
        part = tokens if blocks <= chunk_blocks else tokens[first * block_size : end]
        chunk = extend_chain(part, block_size, parent, extra_keys[first:] if extra_keys else None)
        parent = int.from_bytes(chunk[-HASH_BYTES:], "little")
        yield chunk


def unpack_hashes(packed: bytes) -> list[int]:
    """Packed hashes as integers. Raises InvalidValue if the length is not a multiple of 8."""
    if len(packed) % HASH_BYTES:
        raise InvalidValue(f"packed hashes of {len(packed)} bytes; expected a multiple of {HASH_BYTES}")
    values = array("Q", packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def pack_hashes(hashes: Sequence[int]) -> bytes:
    """Integers as packed hashes. Raises InvalidValue for an integer outside 0..2^64-1."""
    try:
        values = array("Q", hashes)
    except (OverflowError, TypeError) as error:
        raise InvalidValue("a block hash is not an integer from 0 to 2^64-1") from error
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def thin(packed: bytes, granularity: int, first_index: int = 0) -> bytes:
    """Every `granularity`-th hash of a chain: those with index % granularity == granularity - 1, where the first hash has index
    `first_index`."""
    if granularity == 1:
        return packed
    start = (granularity - 1 - first_index) % granularity
    whole = memoryview(packed)[: len(packed) // HASH_BYTES * HASH_BYTES]
    return whole.cast("Q")[start::granularity].tobytes()
