"""A prompt in its identity scope, as token ids or as precomputed hashes, for callers to route."""

from collections.abc import Sequence
from dataclasses import field, replace
from enum import StrEnum
from itertools import accumulate
from typing import Self

from kvatlas.blocks.external_chain import external_chain, is_hash_text
from kvatlas.blocks.hashing import HASH_BYTES, ExtraKeys, pack_hashes, pack_tokens
from kvatlas.blocks.media import MediaItem
from kvatlas.blocks.reuse import ALL_READABLE, CacheReading
from kvatlas.dataclass import dataclass
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import KvConnector
from kvatlas.identity import DEFAULT_EXTERNAL_CHAIN, OWN_CHAIN, Scope
from kvatlas.request import (
    DEFAULT_BLOCK_TOKENS,
    DEFAULT_SLO,
    Fallbacks,
    RequestHints,
    RequestShape,
    Slo,
)
from kvatlas.reservations.waiting_request import WaitingRequest
from kvatlas.validation import DEFAULT_DECODE_TOKENS, MAX_OUTPUT_TOKENS
from router_client.decision.selector import Selector


class Strategy(StrEnum):
    """How to choose one request's worker, overriding the router's settings. `COST`: by overlap, cost and load. `LOAD`: by
    load alone, without the index. `ROUND_ROBIN`: each worker in turn."""

    COST = "cost"
    LOAD = "load"
    ROUND_ROBIN = "round_robin"


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """Minimum and maximum number of output tokens, if the request sets them."""

    least: int = 0
    most: int | None = None

    def largest(self, usual: int) -> int:
        """The largest allowed number of tokens; if there is no maximum, the `usual` number, but at least the
        minimum."""
        return max(usual, self.least) if self.most is None else self.most

    def clamp(self, tokens: int) -> int:
        """The nearest allowed number of tokens, at least 1."""
        return max(1, min(max(tokens, self.least), self.largest(tokens), MAX_OUTPUT_TOKENS))


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request as the router client sees it. Create it with `of_tokens`, `of_hashes`, `of_hints` or `of_shape`.

    `tokens` are hashed for each block size that the pool uses. `hashes` (packed sequence hashes, 8 little-endian bytes each)
    have one `block_size`, and only workers with that block size can hold them. `extra_keys`, for token ids only, has one entry
    per block, so it fits workers of one block size. `media`, for token ids only: images and other items among them, for any
    block size. `block_bytes`: KV bytes of `block_size` tokens, for workers whose fleet record does not say; 0 for unknown;
    `byte_ends`, if blocks differ: the bytes up to each block's end. `session_id`: requests of one session keep their worker, if
    the router's settings say so. `select`: which workers may get the request. `reading`: the request's limits on reading the
    engine's prefix cache.

    `output_tokens`: the expected length of the answer; with `output_limits`, only until the router has learned the length of
    such answers, within these limits. `fetch_by`: connectors of engines to which the sender passes `Choice.fetch` on; a worker
    with one of them may be priced as fetching KV from another. `strategy=None`: the router's settings decide. `notes`: parts
    of the request that were ignored, one line each. `program`: the program that sent it, for its tenant's bill. `waiting`: how
    it waits while no worker has room; None: it is booked anyway. `wait_s`: how long it may wait, if the request says so.
    """

    scope: Scope
    input_tokens: int
    tokens: Sequence[int] | None = None
    hashes: bytes | None = None
    block_size: int | None = None
    extra_keys: Sequence[ExtraKeys] | None = None
    output_tokens: int = DEFAULT_DECODE_TOKENS
    block_bytes: int = 0
    slo: Slo = DEFAULT_SLO
    id: str | None = None
    session_id: str | None = None
    select: Selector | None = None
    reading: CacheReading = ALL_READABLE
    output_limits: OutputLimits | None = None
    strategy: Strategy | None = None
    media: Sequence[MediaItem] = ()
    notes: tuple[str, ...] = ()
    fetch_by: frozenset[KvConnector] = frozenset()
    program: str = ""
    byte_ends: tuple[int, ...] = ()
    waiting: WaitingRequest | None = field(default=None, compare=False, repr=False)
    wait_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.output_tokens <= MAX_OUTPUT_TOKENS:
            raise InvalidValue(f"output_tokens is {self.output_tokens}; expected 0 to {MAX_OUTPUT_TOKENS}")

    @classmethod
    def of_tokens(
        cls,
        scope: Scope,
        tokens: Sequence[int],
        *,
        extra_keys: Sequence[ExtraKeys] | None = None,
        output_tokens: int | None = None,
        slo: Slo = DEFAULT_SLO,
        id: str | None = None,
        session_id: str | None = None,
        select: Selector | None = None,
        reading: CacheReading = ALL_READABLE,
        output_limits: OutputLimits | None = None,
        media: Sequence[MediaItem] = (),
        input_tokens: int | None = None,
    ) -> Self:
        """A prompt of token ids (a list, tuple or array of integers from 0 to 2^32-1). If `output_tokens` is absent, it
        is learned. `input_tokens`: the prompt's length, or an estimate of it, if only its first tokens are known.

        Raises InvalidValue for text or bytes. For an out-of-range token id, it is raised later, when the prompt is
        looked up.
        """
        pack_tokens(tokens[:1])
        return cls(
            scope,
            len(tokens) if input_tokens is None else max(input_tokens, len(tokens)),
            tokens,
            extra_keys=extra_keys,
            output_tokens=DEFAULT_DECODE_TOKENS if output_tokens is None else output_tokens,
            slo=slo,
            id=id,
            session_id=session_id,
            select=select,
            reading=reading,
            output_limits=OutputLimits() if output_tokens is None else output_limits,
            media=media,
        )

    @classmethod
    def of_hashes(
        cls,
        scope: Scope,
        hashes: bytes | Sequence[int],
        block_size: int,
        *,
        input_tokens: int | None = None,
        output_tokens: int | None = None,
        slo: Slo = DEFAULT_SLO,
        id: str | None = None,
    ) -> Self:
        """A prompt of precomputed sequence hashes, packed or as integers; if `input_tokens` is absent, the prompt consists
        of the full blocks only.

        Raises InvalidValue for hashes that are not 64 bits long, a block size below 1, or fewer tokens than the blocks hold.
        """
        packed = bytes(hashes) if isinstance(hashes, (bytes, bytearray)) else pack_hashes(hashes)
        if len(packed) % HASH_BYTES:
            raise InvalidValue(f"packed hashes of {len(packed)} bytes; expected a multiple of {HASH_BYTES}")
        if block_size < 1:
            raise InvalidValue(f"block size {block_size}; expected at least 1")
        in_blocks = len(packed) // HASH_BYTES * block_size
        total = in_blocks if input_tokens is None else input_tokens
        if total < in_blocks:
            raise InvalidValue(f"input_tokens {total}; the blocks alone hold {in_blocks}")
        limits = OutputLimits() if output_tokens is None else None
        expected = DEFAULT_DECODE_TOKENS if output_tokens is None else output_tokens
        return cls(scope, total, None, packed, block_size, None, expected, 0, slo, id, output_limits=limits)

    @classmethod
    def of_hints(cls, hints: RequestHints, fallbacks: Fallbacks | None = None) -> Self:
        """A prompt from a request's hints. If the hints give no chain, block hashes are sequence hashes if all of them are
        integers or 16 hex digits; otherwise their chain is `external:default`.

        Raises InvalidValue for any other text in the chain `own`, for a prompt given twice or not at all, or for a scope
        without a model.
        """
        known = fallbacks or Fallbacks()
        decode = hints.estimated_decode_tokens
        block_bytes = known.block_bytes if hints.block_bytes is None else hints.block_bytes
        output = known.estimated_decode_tokens if decode is None else decode
        scope = hints.scope(known)
        size = hints.block_tokens or known.block_tokens
        if hints.chain == OWN_CHAIN:
            for text in hints.block_hashes or ():
                if not is_hash_text(text):
                    raise InvalidValue(f"block hash {text!r:.80} of chain {OWN_CHAIN}; expected 16 hex digits")
        if hints.token_ids is not None and hints.block_hashes is None and scope.chain == OWN_CHAIN:
            tokens = hints.token_ids
            prompt = cls(scope, len(tokens), tokens, None, size, None, output, block_bytes, hints.slo, hints.request_id)
        elif hints.blocks:
            prompt = cls._of_blocks(hints, known, block_bytes)
        else:
            prompt = cls.of_shape(hints.to_shape(known), block_size=size, block_bytes=block_bytes)
        narrows = hints.labels or hints.allow is not None or hints.deny
        select = Selector(hints.labels, hints.allow, hints.deny) if narrows else None
        limits = OutputLimits() if decode is None else None
        return replace(
            prompt,
            session_id=hints.session_id,
            select=select,
            reading=hints.cache_reading,
            output_limits=limits,
            notes=tuple(f"unknown request field {name!r:.80} ignored" for name in hints.ignored_fields[:8]),
            media=hints.media,
        )

    @classmethod
    def of_shape(cls, shape: RequestShape, *, block_size: int | None = None, block_bytes: int = 0) -> Self:
        """A prompt from a request's shape. If its scope's chain is `own`, its block hashes are sequence hashes of 16 hex
        digits or, if other text is among them, an engine's own hashes in the chain `external:default`. In any other
        chain, they are an engine's own hashes.

        If `block_size` is absent, it is taken from the blocks. Raises InvalidValue for other hashes, or blocks of
        different sizes.
        """
        sizes = {key.token_count for key in shape.blocks} or {block_size or DEFAULT_BLOCK_TOKENS}
        if len(sizes) > 1 or (block_size is not None and sizes != {block_size}):
            raise InvalidValue(f"request {shape.id or ''} has blocks of {sorted(sizes)} tokens; expected one size")
        scope, hashes = _keys_of(shape)
        return cls(
            scope=scope,
            input_tokens=shape.input_tokens,
            hashes=hashes,
            block_size=sizes.pop(),
            output_tokens=shape.estimated_decode_tokens,
            block_bytes=block_bytes,
            slo=shape.slo,
            id=shape.id,
        )

    @classmethod
    def _of_blocks(cls, hints: RequestHints, known: Fallbacks, block_bytes: int) -> Self:
        """A prompt from hints that give a size for each block. A shorter last block is the prompt's tail, which is not
        shared."""
        shape, blocks = hints.to_shape(known), hints.blocks or ()
        size = blocks[0].token_count
        odd = next((at for at, one in enumerate(blocks) if one.token_count != size), None)
        if odd is not None and (odd < len(blocks) - 1 or blocks[odd].token_count > size):
            raise InvalidValue(
                f"request field blocks.{odd}.token_count is {blocks[odd].token_count}; expected {size}, as in the "
                "first block, or fewer in the last one"
            )
        full = shape.blocks if odd is None else shape.blocks[:-1]
        tail = 0 if odd is None else blocks[odd].token_count
        prompt = cls.of_shape(
            replace(shape, blocks=full, tail_tokens=shape.tail_tokens + tail), block_bytes=block_bytes
        )
        sizes = [block_bytes if one.bytes is None else one.bytes for one in blocks[: len(full)]]
        return prompt if set(sizes) == {block_bytes} else replace(prompt, byte_ends=(*accumulate(sizes),))

    def kv_bytes(self, first: int, end: int, block_size: int) -> int:
        """KV bytes of tokens `first` up to `end` according to the request, rounded up; 0 if unknown. `block_size`: the
        size to which `block_bytes` refers, if the prompt has none."""
        size = self.block_size or block_size
        if not self.byte_ends:
            return -(-(end - first) * self.block_bytes // size)
        return self._bytes_before(end, size) - self._bytes_before(first, size)

    def _bytes_before(self, tokens: int, size: int) -> int:
        """Bytes of the first `tokens` tokens in blocks of `size`; tokens after the last block count like those in that
        block."""
        ends = (0, *self.byte_ends)
        at = min(tokens // size, len(ends) - 2)
        return ends[at] + -(-(tokens - at * size) * (ends[at + 1] - ends[at]) // size)

    def of_tenant(self, tenant_id: str) -> Self:
        """The same prompt in another tenant's scope. Raises InvalidValue for an invalid name."""
        return replace(self, scope=replace(self.scope, tenant_id=tenant_id))

    @property
    def is_whole(self) -> bool:
        """True if all of the prompt's tokens, or their hashes, are known."""
        return bool(self.hashes) if self.tokens is None else len(self.tokens) == self.input_tokens

    def required_blocks(self, block_size: int) -> int:
        """Number of the prompt's blocks at a block size, including a partial last one."""
        return -(-self.input_tokens // block_size)


def _keys_of(shape: RequestShape) -> tuple[Scope, bytes]:
    """(scope, packed keys) of the shape's blocks."""
    scope, names = shape.scope, [key.block_hash for key in shape.blocks]
    if scope.chain == OWN_CHAIN:
        if all(map(is_hash_text, names)):
            return scope, pack_hashes([int(name, 16) for name in names])
        scope = replace(scope, chain=DEFAULT_EXTERNAL_CHAIN)
    return scope, external_chain(names, *(key.prefix_hash for key in shape.blocks[:1]))
