"""An engine's KV cache groups as its events describe them, and what follows from them for reuse.

The kind of a group is remembered from any event of it, whatever the tier: removals and offloading don't tell it. Only of an
engine that never told a kind group 0 is taken for full attention. Blocks are announced in the size of full attention, and with
several groups of it (of the model and its draft, or where context parallelism enlarges those of one) in the smallest; the
larger ones count with the sparse groups. What no event tells is a setting: the chunk size of chunked attention, the scheduler's
block size, EAGLE and its groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvatlas.blocks.attention_groups import AttentionGroup, AttentionKind, ResumptionRule
from kvatlas.errors import InvalidValue
from kvatlas_publishers.engine_events import EngineStored
from kvatlas_publishers.ledger.settings import LedgerSettings


@dataclass(frozen=True, slots=True)
class ToldGroup:
    """A group as its events describe it. `block_size` is the largest told: blocks at a prompt's end may be smaller. 0 if only
    a connector told of the group, whose blocks may have any size."""

    kind: AttentionKind
    window_tokens: int | None
    block_size: int


@dataclass(frozen=True, slots=True)
class ReuseOfGroups:
    """What an engine's groups mean for reuse.

    `rule`: needed where residency is not enough, with the bits of each sparse group in `Stretch.held_by`; else None.
    `upper_bound`: why what is told is only an upper bound of what is reused; empty if it is exact, or less. `eagle`: a hit
    drops a block. `groups`: how many KV cache groups there are. `alignment_tokens`: hits are multiples of this; 0: of blocks.
    `lookahead_tokens`: how many tokens behind a block its hash covers.
    """

    rule: ResumptionRule | None = None
    bits: dict[int, tuple[int, ...]] = field(default_factory=dict)
    upper_bound: str = ""
    eagle: bool = False
    groups: int = 1
    alignment_tokens: int = 0
    lookahead_tokens: int = 0


class EngineGroups:
    """See the module. `told`: by index."""

    def __init__(self, settings: LedgerSettings) -> None:
        self.settings = settings
        self.told: dict[int, ToldGroup] = {}
        self.lookahead_tokens = 0
        self.untold_keys = ""
        """See `EngineStored`; what the engine's events have shown last."""
        self._seen: set[tuple[int, AttentionKind | None, int | None, int, int, str]] = set()

    def learn(self, event: EngineStored) -> bool:
        """Take in what the event tells of its group. True if that was new."""
        size, is_full = event.block_size, event.kind is not None and event.kind.is_full
        if event.offloaded or (is_full and not 0 < len(event.token_ids) == size * len(event.hashes)):
            size = 0  # events of sparse groups have the tokens of blocks that were skipped too
        shape = (event.group, event.kind, event.window_tokens, size, event.lookahead_tokens, event.untold_keys)
        if shape in self._seen:
            return False
        if len(self._seen) >= 4096:  # no engine has so many; an odd one costs time, not memory
            self._seen.clear()
        self._seen.add(shape)
        ahead = max(self.lookahead_tokens, event.lookahead_tokens)
        told = self.told.get(event.group)
        if event.kind is not None:
            before = told.block_size if told is not None and told.kind is event.kind else 0
            told = ToldGroup(event.kind, event.window_tokens, max(before, size))
        keys = self.untold_keys if event.offloaded else event.untold_keys
        if told == self.told.get(event.group) and ahead == self.lookahead_tokens and keys == self.untold_keys:
            return False
        self.lookahead_tokens = ahead
        self.untold_keys = keys
        if told is not None:
            self.told[event.group] = told
        return True

    def restore(self, told: Mapping[int, ToldGroup], lookahead_tokens: int, untold_keys: str) -> None:
        """As it was saved."""
        self.told = dict(told)
        self.lookahead_tokens = lookahead_tokens
        self.untold_keys = untold_keys

    @property
    def smallest_full(self) -> int:
        """Tokens of the smallest full blocks of full attention; 0 if that is not told."""
        sizes = [one.block_size for one in self.told.values() if one.kind.is_full and one.block_size]
        return min(sizes, default=0)

    def told_block_size(self, event: EngineStored, known: int | None) -> int | None:
        """Tokens of full attention's smallest full blocks as the event tells it; of groups that tell no kind, the largest
        blocks are the full ones. None if it tells nothing new. `known`: what was told before."""
        if event.offloaded or not self.is_full(event.group) or event.block_size < 1:
            return None
        if event.local_hashes is None and not 0 < len(event.token_ids) == event.block_size * len(event.hashes):
            return None
        size = self.smallest_full or event.block_size
        smaller = known is not None and size < known and not self.smallest_full
        return None if smaller and self.settings.block_size is None else size

    def is_full(self, group: int) -> bool:
        """Does a group need every block before a position? False for one whose kind is not known yet."""
        if not self.told:
            return group == 0
        told = self.told.get(group)
        return told is not None and told.kind.is_full

    def is_resident(self, group: int, block_size: int | None) -> bool:
        """Is what the group holds announced, in blocks of this many tokens? That is full attention, but for larger blocks."""
        told = self.told.get(group)
        return self.is_full(group) and (told is None or block_size is None or told.block_size <= block_size)

    def reuse(self, block_size: int | None) -> ReuseOfGroups:
        """What the groups mean for reuse, in blocks of this many tokens, those that are announced."""
        reuse = self._reuse(block_size)
        return replace(reuse, lookahead_tokens=self.lookahead_tokens, upper_bound=reuse.upper_bound or self.untold_keys)

    def _reuse(self, block_size: int | None) -> ReuseOfGroups:
        settings = self.settings
        eagle = settings.eagle and not self.lookahead_tokens
        told = sorted(self.told.items())
        if not told or block_size is None:
            why = "the engine tells full attention only" if settings.hybrid and not told else ""
            return ReuseOfGroups(upper_bound=why, eagle=eagle, alignment_tokens=settings.alignment_tokens)
        count = len(told)
        sparse = [index for index, _ in told if not self.is_resident(index, block_size)]
        if len(sparse) == count:
            return ReuseOfGroups(eagle=eagle, groups=count)  # without full attention nothing is announced
        try:
            rule = self._rule(told, block_size, eagle)
        except InvalidValue as error:
            return ReuseOfGroups(upper_bound=str(error), eagle=eagle, groups=count)
        aligned = rule.alignment * rule.block_size if rule.alignment > 1 else 0
        if not rule.needs_marks:
            return ReuseOfGroups(eagle=eagle, groups=count, alignment_tokens=aligned)
        if settings.granularity > 1:
            why = f"granularity is {settings.granularity}; a hybrid model needs 1"
            return ReuseOfGroups(upper_bound=why, eagle=eagle, groups=count, alignment_tokens=aligned)
        bits = {
            index: tuple(first << part for part in range(max(1, block_size // group.block_size)))
            for index, group, first in zip(sparse, rule.sparse, rule.first_bits, strict=True)
        }
        return ReuseOfGroups(rule, bits, "", eagle, count, aligned)

    def _rule(self, told: list[tuple[int, ToldGroup]], block_size: int, eagle: bool) -> ResumptionRule:
        """Raises InvalidValue if the groups' rules, or their sizes, can't be computed with."""
        settings = self.settings
        groups = []
        for index, group in told:
            if group.kind is AttentionKind.OTHER:
                raise InvalidValue(f"group {index} has a kind of attention that is not known here")
            if group.kind is AttentionKind.CHUNKED_LOCAL and not settings.chunk_tokens:
                raise InvalidValue(
                    f"group {index} has chunked attention, and its chunk size is not known (--chunk-size)"
                )
            drops = eagle and (index in settings.eagle_groups if settings.eagle_groups else group.kind.is_full)
            groups.append(
                AttentionGroup(
                    group.kind,
                    group.block_size or block_size,
                    group.window_tokens,
                    settings.chunk_tokens or None,
                    eagle=drops,
                )
            )
        return ResumptionRule.of(groups, block_size=block_size, alignment_tokens=settings.alignment_tokens or None)
