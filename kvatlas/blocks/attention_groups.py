"""Which positions of a prompt an engine can resume at: the rules of its KV cache groups (vLLM 0.33).

A model's layers form groups by the kind of their attention, and each group caches blocks of its own under the same hashes.
Position p lies behind p blocks. A prompt is resumed at the deepest position, at most (prompt tokens - 1) // block size, that
every group allows (`HybridKVCacheCoordinator.find_longest_cache_hit`, `single_type_kv_cache_manager`):

- full attention, MLA, sink: all blocks before p are held. This is residency itself, which is prefix-closed;
- sliding window of W tokens: the last ceil((W - 1) / block size) blocks before p are held, or all from the first on;
- chunked local attention of C tokens: the blocks from p's chunk's start up to p are held; a chunk's start needs none;
- mamba: the block before p is held (its state is that of the block's end);
- an EAGLE group without lookahead hashes must hold one block more, which is given up;
- groups of several block sizes: p is a multiple of all of them (the scheduler's block size). A larger block has the hash of
  the last small one that it covers. Of several groups of full attention, residency is that of the smallest blocks; those of
  larger ones must be held up to p too. Windows may have smaller blocks than full attention (Gemma 4).

Groups that never share blocks (circular buffers, bounded replay) publish none and say nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import gcd, lcm

from kvatlas.errors import InvalidValue


class AttentionKind(StrEnum):
    """A group's kind, as vLLM's events name it (`kv_cache_spec_kind`). OTHER: one whose rule is not known here."""

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
        """The kind that an engine names."""
        return _KIND_OF_NAME.get(name, cls.OTHER)

    @property
    def is_full(self) -> bool:
        """Does the group need every block before a position? Then its residency alone says what it allows."""
        return self in _FULL


_KIND_OF_NAME = {kind.value: kind for kind in AttentionKind}
_FULL = frozenset((AttentionKind.FULL, AttentionKind.MLA, AttentionKind.SINK))
_WINDOWED = frozenset((AttentionKind.SLIDING_WINDOW, AttentionKind.SLIDING_WINDOW_MLA))


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """One group. `window_tokens` of a sliding window and `chunk_tokens` of chunked attention are needed there.

    `eagle`: a hit gives up the group's last block. Raises InvalidValue for sizes by which nothing can be computed.
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
        """Does a hit give up one block of this group? vLLM never drops a mamba state: draft models have none."""
        return self.eagle and self.kind is not AttentionKind.MAMBA

    @property
    def longest_run(self) -> int:
        """Beyond this many blocks of this group held in a row, more make no difference. Not for full attention, which needs
        all of them."""
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
        """How many blocks in a row the group must hold before this position, a multiple of its block size, to allow it."""
        position = tokens // self.block_size
        if self.kind in _WINDOWED:
            return min(self.longest_run - self.drops, position)
        if self.kind is AttentionKind.CHUNKED_LOCAL:
            assert self.chunk_tokens is not None
            return tokens % self.chunk_tokens // self.block_size
        return min(1, position)


@dataclass(frozen=True, slots=True)
class ResumptionRule:
    """What the groups of one engine need together, counted in blocks of `block_size` tokens, those that the index has.

    `alignment`: positions are multiples of this many blocks. `dropped`: a position needs this many blocks behind it to be
    resident too. `sparse`: the groups that residency says nothing of, in the order of their bits in `Block.held_by`; among them
    full attention with larger blocks than the smallest.
    """

    block_size: int
    sparse: tuple[AttentionGroup, ...]
    alignment: int = 1
    dropped: int = 0

    @classmethod
    def of(
        cls, groups: Sequence[AttentionGroup], *, block_size: int | None = None, alignment_tokens: int | None = None
    ) -> "ResumptionRule":
        """The rule of these groups. `block_size`: by default the largest that divides all groups' (vLLM hashes by it).
        `alignment_tokens`: the scheduler's block size, by default the smallest that fits all groups.

        Raises InvalidValue where these sizes can't be those of one engine.
        """
        full_sizes = [group.block_size for group in groups if group.kind.is_full]
        if not full_sizes:
            raise InvalidValue("no group of full attention; residency of such a model is not known")
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
                    f"{group.kind} group with blocks of {group.block_size} tokens beside blocks of {unit}: where a prompt can "
                    "be resumed is not known"
                )
        if aligned < 1 or aligned % common:
            raise InvalidValue(f"scheduler block size {aligned}; expected a multiple of {common}")
        dropped = max((group.block_size // unit for group in groups if group.drops), default=0)
        resident = min(full_sizes)
        sparse = tuple(group for group in groups if not group.kind.is_full or group.block_size > resident)
        return cls(unit, sparse, aligned // unit, dropped)

    @property
    def parts(self) -> int:
        """How many blocks of the groups with smaller ones are in one that the index has."""
        return max((self.block_size // group.block_size for group in self.sparse), default=1) or 1

    @property
    def first_bits(self) -> tuple[int, ...]:
        """Of each sparse group its first bit in `Block.held_by`, which has one for each of its blocks in an announced one."""
        bits, bit = [], 1
        for group in self.sparse:
            bits.append(bit)
            bit <<= max(1, self.block_size // group.block_size)
        return tuple(bits)

    @property
    def needs_marks(self) -> bool:
        """Is residency not enough to tell where a prompt can be resumed?"""
        return bool(self.sparse)
