"""A lookup: what the look-alikes of an ask hold of a prompt, found in the index by the same call that chooses among them.

Without one, an ask says what its look-alikes hold, and names all that hold something else. With one, look-alikes may hold the
prompt to any depth, so the ask stays small even if each worker holds a different part of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from kvatlas.blocks.reuse import ReuseRule
from kvatlas.dataclass import dataclass
from kvatlas.errors import KvatlasError
from kvatlas.identity import Scope

MOST_LOOKED_UP = 8_192
"""Limit of the hashes of all chains in one ask. More would make the call's argument too long."""
MOST_LOOKED_UP_CHAINS = 4
"""Limit of the chains of one ask: the store serves no one else while it looks them up. Pools with more shapes of blocks are
looked up separately."""
MOST_NAMED = 64
"""Limit of the workers that a lookup names."""
MOST_ODD_BYTES = 32_768
"""Limit of the bytes of odd workers in one ask. More would make the call's argument too long."""


class LookupImpossible(KvatlasError):
    """The blocks that the workers of an ask hold have to be looked up separately."""


class NotInHbm(LookupImpossible):
    """The cheapest worker of an ask with a lookup holds blocks in other tiers. Only the caller knows what
    reading those costs, so the worker's price here is too low."""


class IndexUnreadable(LookupImpossible):
    """The index in the store is damaged, or its user may not read it."""


class TooManyAlike(LookupImpossible):
    """More workers may be the cheapest than one call may read."""


class Reuse(NamedTuple):
    """How many of a worker's held tokens its engine uses for one prompt (`kvatlas.blocks.reuse.ReuseRule`).

    At most `most_tokens`. `lost_tokens` of a hit are lost: before that limit if `loses_first`, otherwise after it. `share` of
    the rest is used, cut to a multiple of `unit_tokens`.
    """

    most_tokens: int
    lost_tokens: int = 0
    loses_first: bool = False
    share: float = 1.0
    unit_tokens: int = 1

    @classmethod
    def of(cls, rule: ReuseRule, input_tokens: int, block_size: int, readable_tokens: int | None) -> "Reuse":
        """A rule for one prompt; the arguments are those of `ReuseRule.usable_tokens`."""
        unit = rule.alignment_tokens or (block_size if rule.block_aligned else 1)
        most = rule.limit_tokens(input_tokens, readable_tokens)
        return cls(most, rule.dropped_blocks * block_size, rule.drops_resident, min(1.0, rule.share), unit)

    def usable_tokens(self, held_tokens: int) -> int:
        """Equal to `ReuseRule.usable_tokens`; the Lua twin is in `functions/_lookup.lua`."""
        if self.loses_first:
            usable = min(held_tokens - self.lost_tokens, self.most_tokens)
        else:
            usable = min(held_tokens, self.most_tokens) - self.lost_tokens
        if self.share < 1:
            usable = int(usable * self.share)
        return max(0, usable - usable % self.unit_tokens)


class LookupChain(NamedTuple):
    """A prompt's packed sequence hashes, as workers of one shape announce them; each stands for `tokens` tokens."""

    tokens: int
    hashes: bytes


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is looked up. `chains` and `reuse` have one entry for each of the ask's rows of look-alikes; workers of a row
    without a chain hold no block of the prompt.

    Several rows may have one likeness: the first is for all its workers but the `odd` ones, which have the row of that number.
    Marks are not read: workers with marks need an ask without a lookup. `home`: the worker of the prompt's session, which
    costs `home_us` less than its row.

    `named`: workers, each with the number of its row. If there are any, no others are candidates; ties go to the first of them,
    and all are part of the answer.
    """

    scope: Scope
    chains: Sequence[LookupChain | None]
    reuse: Sequence[Reuse]
    odd: Mapping[str, int] = field(default_factory=dict)
    home: str | None = None
    home_us: float = 0.0
    named: Mapping[str, int] = field(default_factory=dict)

    @property
    def distinct_chains(self) -> Sequence[LookupChain]:
        """Each chain once."""
        return list({id(chain): chain for chain in self.chains if chain is not None}.values())
