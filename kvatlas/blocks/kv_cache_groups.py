"""The positions of a prompt at which an engine can resume, according to the rules of its KV cache groups (vLLM 0.33).

A model's layers form groups according to their kind of attention. Each group caches its own blocks under the same hashes.
Position p is the end of the first p blocks. A prompt resumes at the deepest position that every group allows, which is at most
(prompt tokens - 1) // block size (`HybridKVCacheCoordinator.find_longest_cache_hit`, `single_type_kv_cache_manager`):

- full attention, MLA, sink: all blocks before p must be held. This is residency itself, which is prefix-closed;
- sliding window of W tokens: the last ceil((W - 1) / block size) blocks before p must be held, or all blocks before p if there
  are fewer;
- chunked local attention of C tokens: the blocks from the start of p's chunk up to p must be held; none if a chunk starts at p;
- mamba: the block before p must be held (it stores the state at its end);
- an EAGLE group without lookahead hashes: one block more must be held, which is not reused;
- groups with different block sizes: p must be a multiple of all of them (the scheduler's block size). A larger block has the
  hash of the last small one that it covers. If there are several groups of full attention, residency follows the smallest
  blocks, and the groups with larger blocks must also hold everything up to p. Windows may have smaller blocks than full
  attention does (Gemma 4).

Groups that never share blocks (circular buffers, bounded replay) publish no events and are ignored here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import gcd, lcm

from kvatlas.errors import InvalidValue


class AttentionKind(StrEnum):
    """A group's kind, under the name that vLLM's events use for it (`kv_cache_spec_kind`). OTHER: a kind whose rule we don't
    know."""

    FULL = "full_attention"
    MLA = "mla_attention"
    SINK = "sink_full_attention"
    SLIDING_WINDOW = "sliding_window"
    SLIDING_WINDOW_MLA = "sliding_window_mla"
    CHUNKED_LOCAL = "chunked_local_attention"
    MAMBA = "mamba"
    OTHER = "other"

    @classmethod
    def of(cls, name: str) -> "AttentionKind":
        """The kind with the name that an engine uses for it."""
        return _KIND_OF_NAME.get(name, cls.OTHER)

    @property
    def is_full(self) -> bool:
        """True if the group needs every block before a position. In that case, residency alone decides."""
        return self in _FULL


_KIND_OF_NAME = {kind.value: kind for kind in AttentionKind}
_FULL = frozenset((AttentionKind.FULL, AttentionKind.MLA, AttentionKind.SINK))
_WINDOWED = frozenset((AttentionKind.SLIDING_WINDOW, AttentionKind.SLIDING_WINDOW_MLA))


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """One group. `window_tokens` is required for a sliding window, and `chunk_tokens` for chunked attention.

    `eagle`: a hit drops the group's last block. Raises InvalidValue for unusable sizes.
    """

    kind: AttentionKind
    block_size: int
    window_tokens: int | None = None
    chunk_tokens: int | None = None
    eagle: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InvalidValue(f"{self.kind} group with block size {self.block_size}; expected at least 1")
        if self.kind in _WINDOWED and (self.window_tokens is None or self.window_tokens < 1):
            raise InvalidValue(f"{self.kind} group with window {self.window_tokens}; expected at least 1 token")
        if self.kind is AttentionKind.CHUNKED_LOCAL and (
            self.chunk_tokens is None or self.chunk_tokens < 1 or self.chunk_tokens % self.block_size
        ):
            raise InvalidValue(
                f"{self.kind} group with chunk size {self.chunk_tokens}; expected a multiple of its block size "
                f"{self.block_size}"
            )

    @property
    def drops(self) -> bool:
        """True if a hit drops one block of this group. vLLM never drops a mamba state, because draft models have none."""
        return self.eagle and self.kind is not AttentionKind.MAMBA

    @property
    def longest_run(self) -> int:
        """The number of consecutive blocks beyond which more blocks of this group make no difference. Undefined for full
        attention, which needs all of them."""
        if self.kind in _WINDOWED:
            assert self.window_tokens is not None
            needed = -(-(self.window_tokens - 1) // self.block_size)
        elif self.kind is AttentionKind.CHUNKED_LOCAL:
            assert self.chunk_tokens is not None
            needed = self.chunk_tokens // self.block_size - 1
        else:
            needed = 1
        return needed + self.drops

    def blocks_needed(self, tokens: int) -> int:
        """The number of consecutive blocks that the group must hold before this position (a multiple of its block size) in
        order to allow it."""
        position = tokens // self.block_size
        if self.kind in _WINDOWED:
            return min(self.longest_run - self.drops, position)
        if self.kind is AttentionKind.CHUNKED_LOCAL:
            assert self.chunk_tokens is not None
            return tokens % self.chunk_tokens // self.block_size
        return min(1, position)


@dataclass(frozen=True, slots=True)
class ResumptionRule:
    """The combined needs of one engine's groups, counted in index blocks of `block_size` tokens each.

    `alignment`: positions are multiples of this many blocks. `dropped`: this many blocks after a position must be resident too.
    `sparse`: the groups that residency does not cover, in the order of their bits in `Block.held_by`. They include the groups
    of full attention whose blocks are larger than the smallest.
    """

    block_size: int
    sparse: tuple[AttentionGroup, ...]
    alignment: int = 1
    dropped: int = 0

    @classmethod
    def of(
        cls, groups: Sequence[AttentionGroup], *, block_size: int | None = None, alignment_tokens: int | None = None
    ) -> "ResumptionRule":
        """The combined rule for these groups. `block_size`: by default, the largest one that divides all groups' block sizes
        (vLLM hashes blocks of that size). `alignment_tokens`: the scheduler's block size; by default, the smallest one that
        fits all groups.

        Raises InvalidValue if no single engine can have these sizes.
        """
        full_sizes = [group.block_size for group in groups if group.kind.is_full]
        if not full_sizes:
            raise InvalidValue("no group of full attention; residency of such a model is unknown")
        unit = gcd(*(group.block_size for group in groups)) if block_size is None else block_size
        common = lcm(*(group.block_size for group in groups))
        aligned = common if alignment_tokens is None else alignment_tokens
        if unit < 1:
            raise InvalidValue(f"block size {unit}; expected at least 1")
        small = [group for group in groups if group.block_size % unit]
        for group in small:
            if (
                unit % group.block_size
                or group.kind not in _WINDOWED
                or group.drops
                or group.block_size != small[0].block_size
            ):
                raise InvalidValue(
                    f"{group.kind} group has blocks of {group.block_size} tokens, but the block size is {unit}; models with "
                    "this layout are not supported"
                )
        if aligned < 1 or aligned % common:
            raise InvalidValue(f"scheduler block size {aligned}; expected a multiple of {common}")
        dropped = max((group.block_size // unit for group in groups if group.drops), default=0)
        resident = min(full_sizes)
        sparse = tuple(group for group in groups if not group.kind.is_full or group.block_size > resident)
        return cls(unit, sparse, aligned // unit, dropped)

    @property
    def parts(self) -> int:
        """The number of blocks of the smallest group that fit in one index block."""
        return max((self.block_size // group.block_size for group in self.sparse), default=1) or 1

    @property
    def first_bits(self) -> tuple[int, ...]:
        """The first bit of each sparse group in `Block.held_by`. A group has one bit for each of its blocks in an index
        block."""
        bits, bit = [], 1
        for group in self.sparse:
            bits.append(bit)
            bit <<= max(1, self.block_size // group.block_size)
        return tuple(bits)

    @property
    def bits(self) -> int:
        """The number of bits that all sparse groups have in `Block.held_by`, for each of its two kinds of tiers."""
        return sum(max(1, self.block_size // group.block_size) for group in self.sparse)

    @property
    def needs_marks(self) -> bool:
        """True if residency alone does not show where a prompt can resume."""
        return bool(self.sparse)
