"""A cache of prompts' hash chains, so that only the new blocks of a growing conversation are hashed.

A prompt's packed tokens are digested piece by piece, in a tenth of the time that the chain itself takes. The digest of all
tokens up to the end of a piece is the key of the piece's hashes, so prompts with a common start share pieces.
"""

import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from xxhash import xxh3_128

from kvatlas.blocks.hashing import HASH_BYTES, extend_chain, lookahead_chain, pack_tokens

PIECE_BLOCKS = 32
"""When a conversation continues, at most this many of its old blocks are hashed again."""

MOST_BLOCKS = 1 << 20
_TOKEN_BYTES = 4


class ChainCache:
    """Holds a limited number of blocks; the least recently used pieces are dropped first. Not thread-safe."""

    def __init__(self, most_blocks: int = MOST_BLOCKS) -> None:
        self.hashed_blocks = 0
        self.reused_blocks = 0
        self._most_pieces = max(1, most_blocks // PIECE_BLOCKS)
        self._pieces: OrderedDict[tuple[int, int, bytes], bytes] = OrderedDict()

    def __len__(self) -> int:
        """Number of blocks in the cache."""
        return len(self._pieces) * PIECE_BLOCKS

    def chain(
        self, tokens: Sequence[int], block_size: int, chunk_blocks: int, lookahead_tokens: int = 0
    ) -> Iterator[bytes]:
        """The chain of a prompt in packed chunks of up to `chunk_blocks`, equal to `kvatlas.blocks.hashing.lazy_chain`.

        `chunk_blocks` must be a multiple of PIECE_BLOCKS. Raises InvalidValue for an out-of-range token id.
        """
        digest = xxh3_128(pack_tokens(tokens[:lookahead_tokens]))
        parent, tokens = lookahead_chain(tokens, lookahead_tokens)
        whole = len(tokens) // block_size
        packed = memoryview(pack_tokens(tokens))
        chunk: list[bytes] = []
        for first in range(0, whole, PIECE_BLOCKS):
            blocks = min(PIECE_BLOCKS, whole - first)
            part = packed[first * block_size * _TOKEN_BYTES : (first + blocks) * block_size * _TOKEN_BYTES]
            digest.update(part)
            hashes = self._hash_piece(part, block_size, parent, digest.digest(), lookahead_tokens)
            parent = int.from_bytes(hashes[-HASH_BYTES:], "little")
            chunk.append(hashes)
            if len(chunk) * PIECE_BLOCKS >= chunk_blocks:
                yield b"".join(chunk)
                chunk.clear()
        if chunk:
            yield b"".join(chunk)

    def _hash_piece(
        self, part: memoryview, block_size: int, parent: int | None, digest: bytes, lookahead: int
    ) -> bytes:
        key = (block_size, lookahead, digest)
        blocks = len(part) // (block_size * _TOKEN_BYTES)
        if (hashes := self._pieces.get(key)) is not None:
            self._pieces.move_to_end(key)
            self.reused_blocks += blocks
            return hashes
        tokens = array("I", bytes(part))
        if sys.byteorder == "big":
            tokens.byteswap()
        hashes = extend_chain(tokens, block_size, parent)
        self.hashed_blocks += blocks
        self._pieces[key] = hashes
        if len(self._pieces) > self._most_pieces:
            self._pieces.popitem(last=False)
        return hashes
