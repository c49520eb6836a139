"""A model's layer groups by kind of attention: which blocks each group needs to continue, and which it keeps for other
requests.

As in vLLM 0.33's cache managers (`single_type_kv_cache_manager`): a group needs the blocks that its attention still reads,
and a prompt can resume wherever every group has what it needs to continue.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache.block_table import count_blocks

_KINDS = {
    "full": AttentionKind.FULL,
    "swa": AttentionKind.SLIDING_WINDOW,
    "chunked": AttentionKind.CHUNKED_LOCAL,
    "mamba": AttentionKind.MAMBA,
}
_SIZED = ("swa", "chunked")


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One group; `tokens`: the size of its sliding window or chunks, otherwise 0."""

    kind: AttentionKind
    tokens: int = 0

    @classmethod
    def parse(cls, text: str) -> "CacheGroup":
        """Parse `full`, `swa:WINDOW`, `chunked:SIZE` or `mamba`. Raises InvalidValue."""
        name, _, size = text.partition(":")
        sized = name in _SIZED
        if name not in _KINDS or sized != bool(size) or (sized and not (size.isdecimal() and 0 < int(size) < 1 << 32)):
            raise InvalidValue(f"expected full, swa:WINDOW, chunked:SIZE or mamba as a group, not {text!r:.50}")
        return cls(_KINDS[name], int(size or 0))

    def __str__(self) -> str:
        """The text that `parse` takes."""
        name = next(name for name, kind in _KINDS.items() if kind is self.kind)
        return f"{name}:{self.tokens}" if name in _SIZED else name

    @property
    def is_full(self) -> bool:
        return self.kind.is_full

    @property
    def window_tokens(self) -> int | None:
        """The window as reported in events; None unless the group has a sliding window."""
        return self.tokens if self.kind is AttentionKind.SLIDING_WINDOW else None

    def first_needed(self, computed: int, block_size: int) -> int:
        """The first block that a sequence with this many computed tokens still reads."""
        match self.kind:
            case AttentionKind.SLIDING_WINDOW:
                return max(0, computed - self.tokens + 1) // block_size
            case AttentionKind.CHUNKED_LOCAL:
                return computed // self.tokens * self.tokens // block_size
            case AttentionKind.MAMBA:
                return max(0, computed - 1) // block_size  # its state covers everything before it
        return 0

    def most_blocks(self, tokens: int, step_tokens: int, block_size: int) -> int:
        """The most blocks that full, windowed or chunked attention holds at once while a prompt of this many tokens is
        computed in steps of at most `step_tokens`."""
        whole = count_blocks(tokens, block_size)
        match self.kind:
            case AttentionKind.SLIDING_WINDOW:  # a window may begin within a block
                return min(whole, count_blocks(self.tokens - 1 + step_tokens, block_size) + 1)
            case AttentionKind.CHUNKED_LOCAL:
                return min(whole, count_blocks(self.tokens + step_tokens, block_size))
        return whole


def parse_groups(texts: Iterable[str]) -> tuple[CacheGroup, ...]:
    """The groups of one model, each in the form of `CacheGroup.parse`. Raises InvalidValue."""
    groups = tuple(CacheGroup.parse(text) for text in texts)
    if sum(group.is_full for group in groups) != 1:
        raise InvalidValue("expected exactly one group of full attention")
    return groups


@dataclass(frozen=True, slots=True)
class Retention:
    """Decides which blocks sliding windows and mamba keep for other requests.

    They always keep the blocks that a request needs to resume at a prompt's end, or where an earlier request diverged from it.
    In addition, they keep the blocks needed at each multiple of `interval` tokens, a multiple of the block size (0: no others).
    An interval of one block keeps all. vLLM's default is 0 (`prefix_cache_retention_interval`). Full and chunked attention keep
    every block.
    """

    interval: int = 0

    def kept(self, group: CacheGroup, start: int, end: int, ends: Iterable[int], block_size: int) -> list[int]:
        """The indices of the blocks from `start` to `end` that the group keeps. `ends`: positions, in tokens, that can be
        resumed because a prompt or a shared part ends there."""
        if group.kind not in (AttentionKind.SLIDING_WINDOW, AttentionKind.MAMBA):
            return list(range(start, end))
        positions = {tokens // block_size for tokens in ends}
        if self.interval:
            step = self.interval // block_size
            # a window that ends after this range may begin in it
            reach = end + (group.tokens + block_size) // block_size
            positions.update(range((start // step + 1) * step, reach + 1, step))
        found: set[int] = set()
        for position in positions:
            needed = group.first_needed(position * block_size, block_size)
            found.update(range(max(start, needed), min(end, position)))
        return sorted(found)
