"""A request as the lab replays it: sizes, an arrival, and an id for the content of each block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvatlas.blocks.hashing import extend_chain
from kvatlas.identity import DEFAULT_TENANT, Scope
from kvatlas_simulator.cache.block_hash import Namespace

MODEL = "lab-model"
CONTENT_IDS = 1 << 31
"""Ids of contents that a trace names are below it; those of blocks that no other request shares are above."""

FULL = 0
"""A block in the simulator's cache is two tokens: its content's id, written when its first real token is computed, and
FULL, when its last one is. So the cache holds, shares and evicts whole blocks of any size at the cost of two tokens."""


class Identity(NamedTuple):
    """The identity scope of a request, besides the lab's one model."""

    adapter: str | None = None
    tenant: str = DEFAULT_TENANT

    @property
    def scope(self) -> Scope:
        return Scope(MODEL, MODEL, self.adapter, self.tenant)

    @property
    def namespace(self) -> Namespace:
        """As the engine knows it: the tenant is the cache salt."""
        return Namespace(self.adapter, None if self.tenant == DEFAULT_TENANT else self.tenant)


DEFAULT_IDENTITY = Identity()


@dataclass(frozen=True, slots=True)
class LabRequest:
    """`contents`: the ids of all blocks of prompt and answer, also of the last, partial one; equal ids behind equal ids are
    equal tokens. `session`: requests of one conversation have the same."""

    number: int
    arrival_us: float
    input_tokens: int
    output_tokens: int
    contents: tuple[int, ...]
    session: int
    identity: Identity = DEFAULT_IDENTITY

    def prompt_contents(self, block_tokens: int) -> tuple[int, ...]:
        """The ids of the prompt's full blocks."""
        return self.contents[: self.input_tokens // block_tokens]

    def prompt_chain(self, block_tokens: int) -> bytes:
        """The packed sequence hashes of the prompt's full blocks, as the ledger makes them of the engine's events."""
        return extend_chain(written(self.prompt_contents(block_tokens)), 2)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival. `quantum_us`: arrivals are only known to this much; each seed draws them within it."""

    name: str
    block_tokens: int
    requests: Sequence[LabRequest]
    quantum_us: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)


def written(contents: Sequence[int]) -> list[int]:
    """The cache's tokens of full blocks with these contents."""
    return [token for content in contents for token in (content, FULL)]


def written_tokens(tokens: int, block_tokens: int) -> int:
    """How many of the cache's tokens stand for a sequence's first real tokens."""
    full, rest = divmod(tokens, block_tokens)
    return 2 * full + (rest > 0)
