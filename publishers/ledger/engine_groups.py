"""An engine's KV cache groups as its events describe them, and their consequences for reuse.

A group's kind is remembered from any of its events, in any tier, because removals and offloading events omit it. If an engine
never reports a kind, group 0 counts as full attention. Blocks are published in the size of full attention. If several groups
have full attention (model and draft, or context parallelism that enlarges one group's blocks), the smallest size counts, and
groups with larger blocks are treated as sparse. Facts that no event reports are settings: the chunk size of chunked attention,
the scheduler's block size, EAGLE and its groups.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvatlas.blocks.kv_cache_groups import AttentionGroup, AttentionKind, ResumptionRule
from kvatlas.errors import InvalidValue
from kvatlas_publishers.engine_events import EngineStored
from kvatlas_publishers.ledger.settings import LedgerSettings


@dataclass(frozen=True, slots=True)
class ToldGroup:
    """A group as its events describe it. `block_size`: the largest reported, because blocks at the end of a prompt may be
    smaller; 0 if only a connector has reported the group, because a connector's blocks may have any size."""

    kind: AttentionKind
    window_tokens: int | None
    block_size: int


@dataclass(frozen=True, slots=True)
class ReuseOfGroups:
    """The consequences of an engine's groups for reuse.

    `rule`: set if residency is not enough to tell what is reusable, and `bits` has each sparse group's bits in
    `Stretch.held_by`; otherwise None. `upper_bound`: why the published blocks are only an upper bound on reuse; empty if they
    are exact or fewer. `eagle`: a hit drops a block. `groups`: number of KV cache groups. `alignment_tokens`: hits are
    multiples of this; 0: multiples of blocks. `lookahead_tokens`: number of tokens after a block that its hash covers.
    """

    rule: ResumptionRule | None = None
    bits: dict[int, tuple[int, ...]] = field(default_factory=dict)
    upper_bound: str = ""
    eagle: bool = False
    groups: int = 1
    alignment_tokens: int = 0
    lookahead_tokens: int = 0


class EngineGroups:
    """See the module docstring. `told`: the reported groups, by index."""

    def __init__(self, settings: LedgerSettings) -> None:
        self.settings = settings
        self.told: dict[int, ToldGroup] = {}
        self.lookahead_tokens = 0
        self.untold_keys = ""
        """See `EngineStored`; the value of the engine's latest events."""
        self._seen: set[tuple[int, AttentionKind | None, int | None, int, int, str]] = set()

    def learn(self, event: EngineStored) -> bool:
        """Learn an event's facts about its group. Returns True if any of them was new."""
        size, is_full = event.block_size, event.kind is not None and event.kind.is_full
        if event.offloaded or (is_full and not 0 < len(event.token_ids) == size * len(event.hashes)):
            size = 0  # events of sparse groups also have the tokens of skipped blocks
        shape = (event.group, event.kind, event.window_tokens, size, event.lookahead_tokens, event.untold_keys)
        if shape in self._seen:
            return False
        if len(self._seen) >= 4096:  # no engine has that many; this limits the memory that an odd one takes
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
        self.told = dict(told)
        self.lookahead_tokens = lookahead_tokens
        self.untold_keys = untold_keys

    @property
    def smallest_full(self) -> int:
        """The number of tokens in the smallest full blocks of full attention; 0 if unknown."""
        sizes = [one.block_size for one in self.told.values() if one.kind.is_full and one.block_size]
        return min(sizes, default=0)

    def told_block_size(self, event: EngineStored, known: int | None) -> int | None:
        """The block size in tokens according to the event: that of full attention's smallest blocks. If groups report no
        kind, the largest blocks are taken for full attention's. None if the event doesn't change it.

        `known`: the size so far.
        """
        if event.offloaded or not self.is_full(event.group) or event.block_size < 1:
            return None
        if event.local_hashes is None and not 0 < len(event.token_ids) == event.block_size * len(event.hashes):
            return None
        size = self.smallest_full or event.block_size
        smaller = known is not None and size < known and not self.smallest_full
        return None if smaller and self.settings.block_size is None else size

    def is_full(self, group: int) -> bool:
        """True if a group needs every block before a position. False while its kind is unknown."""
        if not self.told:
            return group == 0
        told = self.told.get(group)
        return told is not None and told.kind.is_full

    def is_resident(self, group: int, block_size: int | None) -> bool:
        """True if the group's blocks are published: those of full attention, unless they are larger than this many tokens."""
        told = self.told.get(group)
        return self.is_full(group) and (told is None or block_size is None or told.block_size <= block_size)

    def reuse(self, block_size: int | None) -> ReuseOfGroups:
        """The groups' consequences for reuse. `block_size`: tokens per published block."""
        reuse = self._reuse(block_size)
        return replace(reuse, lookahead_tokens=self.lookahead_tokens, upper_bound=reuse.upper_bound or self.untold_keys)

    def _reuse(self, block_size: int | None) -> ReuseOfGroups:
        settings = self.settings
        eagle = settings.eagle and not self.lookahead_tokens
        told = sorted(self.told.items())
        if not told or block_size is None:
            why = "the engine reports full attention only" if settings.hybrid and not told else ""
            return ReuseOfGroups(upper_bound=why, eagle=eagle, alignment_tokens=settings.alignment_tokens)
        count = len(told)
        sparse = [index for index, _ in told if not self.is_resident(index, block_size)]
        if len(sparse) == count:
            return ReuseOfGroups(eagle=eagle, groups=count)  # without full attention nothing is published
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
        """The resumption rule of these groups. Raises InvalidValue if a group's kind or the combination of sizes is not
        supported."""
        settings = self.settings
        groups = []
        for index, group in told:
            if group.kind is AttentionKind.OTHER:
                raise InvalidValue(f"group {index} has an unknown kind of attention")
            if group.kind is AttentionKind.CHUNKED_LOCAL and not settings.chunk_tokens:
                raise InvalidValue(f"group {index} has chunked attention, but its chunk size is unknown (--chunk-size)")
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
