"""A request as replayed in the lab: its sizes, its arrival, and an id for each block's content."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from kvatlas.blocks.hashing import extend_chain
from kvatlas.identity import DEFAULT_TENANT, Scope
from kvatlas_simulator.cache.block_hash import Namespace

MODEL = "lab-model"
CONTENT_IDS = 1 << 31
"""Ids of contents that a trace names are below this; blocks that no other request shares have ids from here on."""

FULL = 0
"""A block in the simulator's cache is two tokens: its content's id, written when its first real token is computed, and FULL,
written when its last one is computed. So the cache holds, shares and evicts whole blocks of any size at the cost of two
tokens."""


class Identity(NamedTuple):
    """The identity scope of a request; the model is always the lab's."""

    adapter: str | None = None
    tenant: str = DEFAULT_TENANT

    @property
    def scope(self) -> Scope:
        return Scope(MODEL, MODEL, self.adapter, self.tenant)

    @property
    def namespace(self) -> Namespace:
        """The namespace in the engine: the tenant is the cache salt."""
        return Namespace(self.adapter, None if self.tenant == DEFAULT_TENANT else self.tenant)


DEFAULT_IDENTITY = Identity()


@dataclass(frozen=True, slots=True)
class LabRequest:
    """`contents`: the ids of all blocks of prompt and answer, including a partial last one; equal ids after equal ids are equal
    tokens. `session`: the same for all requests of a conversation. `weight`: the tenant's share of a queue. `after`: the number
    of the request that its client waits for first; it then arrives `arrival_us` after the end of that one. `router`: the router
    that its client uses, if there are several; None: each in turn."""

    number: int
    arrival_us: float
    input_tokens: int
    output_tokens: int
    contents: tuple[int, ...]
    session: int
    identity: Identity = DEFAULT_IDENTITY
    weight: float = 1.0
    after: int | None = None
    router: int | None = None

    def prompt_contents(self, block_tokens: int) -> tuple[int, ...]:
        """The ids of the prompt's full blocks."""
        return self.contents[: self.input_tokens // block_tokens]

    def prompt_chain(self, block_tokens: int) -> bytes:
        """The packed sequence hashes of the prompt's full blocks, as the ledger computes them from the engine's events."""
        return _chain(self.prompt_contents(block_tokens))


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival. `quantum_us`: resolution of the arrival times; each seed draws times within it."""

    name: str
    block_tokens: int
    requests: Sequence[LabRequest]
    quantum_us: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return sum(request.input_tokens for request in self.requests)


@lru_cache(maxsize=4_096)
def _chain(contents: tuple[int, ...]) -> bytes:
    """The packed sequence hashes of full blocks with these contents. Cached, because each policy asks for the same prompts."""
    return extend_chain(written(contents), 2)


def written(contents: Sequence[int]) -> list[int]:
    """The cache's tokens for full blocks with these contents."""
    return [token for content in contents for token in (content, FULL)]


def written_tokens(tokens: int, block_tokens: int) -> int:
    """Number of the cache's tokens that represent a sequence's first real tokens."""
    full, rest = divmod(tokens, block_tokens)
    return 2 * full + (rest > 0)
