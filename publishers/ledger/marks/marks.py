"""Marks: published blocks at which a prompt can be resumed, for hybrid models, where residency alone is not enough.

A block is **marked** if it is published and the engine's groups allow resuming `ResumptionRule.dropped` blocks before its end.
A group's run is the number of consecutive blocks that it holds up to a block. It follows from the parent's run, so a batch
costs work for the blocks that it touched, and for their descendants only as long as runs change: at most for a window, or up
to the end of a chunk. A group of full attention whose blocks are larger than the resident ones has run 1 while all of them are
held.

A lookup must find the deepest marked block of a chain without checking every block. So marks are also kept by segment. The
**head** of a mark is its ancestor whose index is a multiple of SEGMENT. It has one bit for each offset at which a block of the
segment below it is marked, on any branch.

A block's state depends on the blocks before it, so every stretch of a ledger with marks is a single block.

**Tiers** can't be mixed at will. An engine takes the longest hit in its device tier, for which all groups need all their
blocks there. From its end on it asks its connector, for which all groups need theirs in the connector's tiers (vLLM 0.33:
`Scheduler.schedule`, `get_num_new_matched_tokens`). So each group has a run in the device tier and one in the other tiers. A
block in the other tiers counts only if it is **reachable**: all blocks since the last mark in the device tier, or since the
root, are held there too. Runs may begin at that mark, because the connector is asked only for what follows it. With dropped
blocks, they may begin only at the root.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple, Self

from kvatlas.blocks.kv_cache_groups import AttentionGroup, AttentionKind, ResumptionRule
from kvatlas.blocks.tiers import Tier
from kvatlas_publishers.ledger.block import Stretch

SEGMENT = 64
"""Number of blocks per segment, and of bits per head."""

_RUN_BITS = 20
"""`Stretch.runs` has two fields of this many bits for each sparse group: its runs up to this block, in the device tier and in
the others."""
_RUN = (1 << _RUN_BITS) - 1
_UNREACHABLE_BY_DEVICE, _REACHABLE = 1, 2
"""Flags before the runs in `Stretch.runs`: some block up to this one is not in the device tier; see the module. After the runs
is the number of blocks since that mark, up to the longest run that a group needs."""
_FLAG_BITS = 2
_DEVICE = Tier.HBM.flag
_BY_INDEX = attrgetter("index")


@dataclass(slots=True)
class MarkChange:
    """The changes made by one batch. `heads`: heads whose bits changed, with the new bits; bit 0 stands for the head
    itself."""

    unmarked: list[Stretch] = field(default_factory=list)
    marked: list[Stretch] = field(default_factory=list)
    heads: dict[Stretch, int] = field(default_factory=dict)


class _MarkedGroup(NamedTuple):
    """A sparse group. Its run is at `shift` in `Stretch.runs`; its bits in `Stretch.held_by` are `bits`, one for each of
    `parts`, from `first_bit` on. One of its blocks ends every `stride` blocks. `lag`: blocks from a position's mark to the
    one that counts."""

    group: AttentionGroup
    is_full: bool
    shift: int
    first_bit: int
    bits: int
    parts: int
    stride: int
    longest: int
    lag: int

    @classmethod
    def of(cls, group: AttentionGroup, rule: ResumptionRule, shift: int, first_bit: int) -> Self:
        parts = max(1, rule.block_size // group.block_size)
        stride = max(1, group.block_size // rule.block_size)
        longest = 1 if group.kind.is_full else group.longest_run
        lag = rule.dropped - (stride if group.drops else 0)
        bits = first_bit * ((1 << parts) - 1)
        return cls(group, group.kind.is_full, shift, first_bit, bits, parts, stride, longest, lag)


class Marks:
    """The marks of one ledger. Call `settle` after each whole batch. Only `settle` writes `Stretch.runs`."""

    def __init__(self, rule: ResumptionRule) -> None:
        self._rule = rule
        count = len(rule.sparse)
        self._in_device, self._in_others = (
            tuple(
                _MarkedGroup.of(group, rule, _FLAG_BITS + (first + slot) * _RUN_BITS, bit << shift)
                for slot, (group, bit) in enumerate(zip(rule.sparse, rule.first_bits, strict=True))
            )
            for first, shift in ((0, 0), (count, rule.bits))
        )
        self._groups = self._in_device + self._in_others
        self._since_at = _FLAG_BITS + 2 * count * _RUN_BITS
        self._longest = max((group.longest * group.stride for group in self._groups), default=0)
        self._above_root = _REACHABLE + sum(1 << group.shift for group in self._groups if group.is_full)
        always_needed = [group for group in rule.sparse if group.kind is not AttentionKind.CHUNKED_LOCAL]
        self._needs_runs = not rule.dropped and any(group.longest_run for group in always_needed)
        self._is_simple = rule.alignment == 1 and self._needs_runs
        self._marked: set[Stretch] = set()
        self._heads: dict[Stretch, dict[int, int]] = {}  # head -> offset -> marked blocks there

    @property
    def marked(self) -> Iterable[Stretch]:
        return self._marked

    @property
    def heads(self) -> Mapping[Stretch, int]:
        return {head: _bits(offsets) for head, offsets in self._heads.items()}

    def settle(self, touched: Iterable[Stretch]) -> MarkChange:
        """Update the marks for blocks that are new, announced or withdrawn, or that a sparse group has gained or lost."""
        affected = self._extend_runs(touched)
        change = MarkChange()
        marks = self._marked
        for block in affected:
            if self._is_resumable(block):
                if block not in marks:
                    marks.add(block)
                    change.marked.append(block)
            elif block in marks:
                marks.discard(block)
                change.unmarked.append(block)
        if change.marked or change.unmarked:
            self._count_heads(change)
        return change

    def _extend_runs(self, touched: Iterable[Stretch]) -> dict[Stretch, None]:
        """Recompute the runs of the touched blocks and, while they change, of their descendants. Returns the blocks whose mark
        may change."""
        affected: dict[Stretch, None] = {}
        waiting = sorted(touched, key=_BY_INDEX, reverse=True)
        behind: list[Stretch] = []
        while waiting:
            block = waiting.pop()
            affected[block] = None
            runs = self._runs_of(block)
            if runs != block.runs:
                block.runs = runs
                behind.append(block)
                waiting.extend(block.iter_children())
        for _ in range(self._rule.dropped):
            behind = [child for block in behind for child in block.iter_children()]
            affected.update(dict.fromkeys(behind))
        return affected

    def _runs_of(self, block: Stretch) -> int:
        above = self._above_root if block.parent is None else block.parent.runs
        tiers = max(block.usable, 0)
        if self._is_simple and not block.held_by and tiers == _DEVICE and not above & _UNREACHABLE_BY_DEVICE:
            return 0
        runs = 0
        for group in self._groups:
            run = above >> group.shift & _RUN
            if (block.index + 1) % group.stride == 0:  # otherwise inside one of the group's larger blocks
                missing = group.bits & ~block.held_by
                if missing:
                    run = group.parts - (missing // group.first_bit).bit_length()
                elif not group.is_full:
                    run = min(run + group.parts, group.longest)
            runs |= run << group.shift
        if above & _UNREACHABLE_BY_DEVICE or not tiers & _DEVICE:
            runs |= _UNREACHABLE_BY_DEVICE
        elif not self._rule.dropped and self._allow(self._in_device, block, runs):
            return runs | _REACHABLE
        if tiers & ~_DEVICE and above & _REACHABLE:
            runs |= _REACHABLE | min((above >> self._since_at) + 1, self._longest) << self._since_at
        return runs

    def _is_resumable(self, block: Stretch) -> bool:
        runs, tiers = block.runs, block.usable
        if (self._needs_runs and not runs) or tiers <= 0:
            return False
        if not runs & _UNREACHABLE_BY_DEVICE and self._allow(self._in_device, block, runs):
            return True
        if not (tiers & ~_DEVICE and runs & _REACHABLE):
            return False
        return self._allow(self._in_others, block, runs, since=runs >> self._since_at)

    def _allow(self, groups: Iterable[_MarkedGroup], block: Stretch, runs: int, since: int = _RUN) -> bool:
        """True if the groups' runs allow resuming at the block, which has `runs`. No run needs more than `since` blocks."""
        rule = self._rule
        position = block.index + 1 - rule.dropped
        if position <= 0 or position % rule.alignment:
            return False
        tokens = position * rule.block_size
        for group in groups:
            at_runs = runs
            if group.lag:
                at: Stretch | None = block
                for _ in range(group.lag):
                    assert at is not None, "a position above 0 has its blocks above it"
                    at = at.parent
                assert at is not None
                at_runs = at.runs
            needed = 1 if group.is_full else group.group.blocks_needed(tokens) + group.group.drops
            if group.group.drops and rule.alignment > group.stride and needed < group.longest:
                return False  # vLLM aligns a run from the first block before and after the drop: never claimed
            if (at_runs >> group.shift & _RUN) < min(needed, since * group.parts // group.stride):
                return False
        return True

    def _count_heads(self, change: MarkChange) -> None:
        before: dict[Stretch, int] = {}
        found: dict[Stretch, Stretch] = {}
        for blocks, sign in ((change.unmarked, -1), (change.marked, 1)):
            for block in blocks:
                head = _head_of(block, found)
                offsets = self._heads.setdefault(head, {})
                before.setdefault(head, _bits(offsets))
                offset = block.index % SEGMENT
                count = offsets.get(offset, 0) + sign
                if count:
                    offsets[offset] = count
                else:
                    del offsets[offset]
        for head, bits in before.items():
            offsets = self._heads[head]
            now = _bits(offsets)
            if now != bits:
                change.heads[head] = now
            if not offsets:
                del self._heads[head]


def _bits(offsets: Iterable[int]) -> int:
    return sum(1 << offset for offset in offsets)


def _head_of(block: Stretch, found: dict[Stretch, Stretch]) -> Stretch:
    """The block's ancestor that starts its segment. `found` caches it for the blocks in between."""
    path: list[Stretch] = []
    at = block
    while at not in found and at.index % SEGMENT:
        path.append(at)
        assert at.parent is not None
        at = at.parent
    head = found.get(at, at)
    found.update(dict.fromkeys(path, head))
    return head
