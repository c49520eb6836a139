"""A lookup: what the look-alikes of an ask hold of a prompt, found in the index by the same call that chooses among them.

Without a lookup, an ask says what its look-alikes hold, and names all workers that hold something else. With a lookup,
look-alikes may hold the prompt to any depth, so the ask stays small even if each worker holds a different part of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from kvatlas.blocks.reuse import ReuseRule
from kvatlas.dataclass import dataclass
from kvatlas.errors import KvatlasError
from kvatlas.identity import Scope

MOST_LOOKED_UP = 8_192
"""Maximum number of hashes in all chains of one ask. More of them would make the call's argument too long."""
MOST_LOOKED_UP_CHAINS = 4
"""Maximum number of chains of one ask, because the store serves no one else while it looks them up. Pools with more shapes of
blocks are looked up separately."""
MOST_NAMED = 64
"""Maximum number of workers that a lookup names."""
MOST_ODD_BYTES = 32_768
"""Maximum number of bytes for the odd workers in one ask. More would make the call's argument too long."""


class LookupImpossible(KvatlasError):
    """The blocks that the workers of an ask hold must be looked up separately."""


class NotInHbm(LookupImpossible):
    """The cheapest worker of an ask with a lookup holds blocks in other tiers. Only the caller knows what it costs to read
    those, so the worker's price here is too low."""


class IndexUnreadable(LookupImpossible):
    """The index in the store is damaged, or its user is not allowed to read it."""


class TooManyAlike(LookupImpossible):
    """More workers may be the cheapest than one call is allowed to read."""


class Reuse(NamedTuple):
    """How many of the tokens that a worker holds its engine uses for one prompt (`kvatlas.blocks.reuse.ReuseRule`).

    At most `most_tokens` are used. `lost_tokens` of a hit are lost: before that limit applies if `loses_first` is set,
    otherwise after it. `share` of the rest is used, rounded down to a multiple of `unit_tokens`.
    """

    most_tokens: int
    lost_tokens: int = 0
    loses_first: bool = False
    share: float = 1.0
    unit_tokens: int = 1

    @classmethod
    def of(cls, rule: ReuseRule, input_tokens: int, block_size: int, readable_tokens: int | None) -> "Reuse":
        """The rule for one prompt; the arguments are those of `ReuseRule.usable_tokens`."""
        unit = rule.alignment_tokens or (block_size if rule.block_aligned else 1)
        most = rule.limit_tokens(input_tokens, readable_tokens)
        return cls(most, rule.dropped_blocks * block_size, rule.drops_resident, min(1.0, rule.share), unit)

    def usable_tokens(self, held_tokens: int) -> int:
        """Gives the same result as `ReuseRule.usable_tokens`; its twin in Lua is in `functions/_lookup.lua`."""
        if self.loses_first:
            usable = min(held_tokens - self.lost_tokens, self.most_tokens)
        else:
            usable = min(held_tokens, self.most_tokens) - self.lost_tokens
        if self.share < 1:
            usable = int(usable * self.share)
        return max(0, usable - usable % self.unit_tokens)


class LookupChain(NamedTuple):
    """A prompt's packed sequence hashes, as workers with one shape of blocks announce them; each stands for `tokens` tokens."""

    tokens: int
    hashes: bytes


@dataclass(frozen=True, slots=True)
class Lookup:
    """What is looked up. `chains` and `reuse` have one entry for each of the ask's rows of look-alikes; workers in a row
    without a chain hold no blocks of the prompt.

    Several rows may have the same likeness: the first one is for all its workers except the `odd` ones, which belong to the row
    with the number given there. Marks are not read: workers with marks need an ask without a lookup. `home`: the worker of the
    prompt's session, which costs `home_us` less than its row.

    `named`: workers, each with the number of its row. If there are any, no others are candidates; ties go to the first of them,
    and the answer includes all of them.
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
