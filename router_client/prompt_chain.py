"""A prompt's hash chain, computed only as far as a worker holds it.

The first lookup covers FIRST_BLOCKS blocks, each later one GROWTH times as many as the one before. So a cold prompt costs one
round trip and FIRST_BLOCKS hashes, however long it is; a hit of 1,024 blocks costs one round trip, and one of 8,192 blocks
costs two. (Hashing that many takes about as long as a round trip.) Precomputed hashes are all looked up in one call.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from kvatlas.blocks.hashing import HASH_BYTES, ExtraKeys, lazy_chain, pack_tokens
from kvatlas.blocks.media import media_keys
from router_client.prompt import Prompt

FIRST_BLOCKS = 1_024
GROWTH = 8
START_BLOCKS = 256
"""Prompts of token ids that share this many blocks have the same start: ties are broken the same way for all of them."""


class PromptChain:
    """The chain of one prompt at one block size: packed sequence hashes by chunk. Each chunk is computed once and
    kept."""

    __slots__ = ("_chunks", "_pieces", "_ready", "_tokens")

    def __init__(self, prompt: Prompt, block_size: int, lookahead_tokens: int = 0) -> None:
        """`lookahead_tokens`: the number of tokens after a block that its hash also covers (`kvatlas.blocks.hashing`); for
        precomputed hashes, there are none."""
        self._chunks: list[bytes] = []
        self._pieces: Iterator[bytes] | None = None
        self._ready: bytes | None = None
        self._tokens: Sequence[int] = () if prompt.tokens is None else prompt.tokens
        if prompt.tokens is not None:
            keys = _extra_keys(prompt, prompt.tokens, block_size, lookahead_tokens)
            self._pieces = lazy_chain(prompt.tokens, block_size, FIRST_BLOCKS, keys, lookahead_tokens)
        elif prompt.block_size == block_size and not lookahead_tokens:
            self._ready = prompt.hashes

    def chunk(self, number: int) -> bytes:
        """The hashes of a chunk; empty after the last chunk. Raises InvalidValue for an out-of-range token id."""
        if self._ready is not None:
            return self._ready if number == 0 else b""
        while self._pieces is not None and len(self._chunks) <= number:
            pieces = GROWTH ** len(self._chunks)
            chunk = b"".join(islice(self._pieces, pieces))
            if not chunk:
                break
            self._chunks.append(chunk)
        return self._chunks[number] if number < len(self._chunks) else b""

    def all_hashes(self) -> bytes:
        """The hashes of all full blocks. Raises InvalidValue for an out-of-range token id."""
        if self._ready is not None:
            return self._ready
        while self.chunk(len(self._chunks)):
            pass
        return b"".join(self._chunks)

    def prefix_hash(self, blocks: int) -> bytes:
        """The hash of the prompt's first blocks, up to START_BLOCKS of them; if there is no full block, the
        fingerprint."""
        return self._start[: blocks * HASH_BYTES][-HASH_BYTES:] or self.fingerprint

    @property
    def hashed_blocks(self) -> int:
        """Number of blocks hashed so far."""
        return sum(len(chunk) for chunk in self._chunks) // HASH_BYTES

    @property
    def fingerprint(self) -> bytes:
        """Identifies the prompt for tie-breaking: the last hash of its start or, if there is no full block, its
        tokens."""
        return self._start[-HASH_BYTES:] or pack_tokens(self._tokens[:START_BLOCKS])

    @property
    def _start(self) -> bytes:
        """All precomputed hashes, or the hashes of up to START_BLOCKS blocks."""
        return self.chunk(0) if self._ready is not None else self.chunk(0)[: START_BLOCKS * HASH_BYTES]


def _extra_keys(
    prompt: Prompt, tokens: Sequence[int], block_size: int, lookahead_tokens: int
) -> Sequence[ExtraKeys] | None:
    """The extra keys for the prompt's media, followed by the prompt's own extra keys."""
    if not prompt.media:
        return prompt.extra_keys
    keys = media_keys(prompt.media, block_size, len(tokens) // block_size, lookahead_tokens)
    for i, own in enumerate((prompt.extra_keys or ())[: len(keys)]):
        if own:
            keys[i] = [*(keys[i] or ()), *own]
    return keys
