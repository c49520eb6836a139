"""The inputs of one choice, before the candidates are priced."""

from kvatlas.dataclass import dataclass
from router_client.basis import Basis
from router_client.pricing.overlap import PromptLookup
from router_client.pricing.pool import Pool
from router_client.prompt import Prompt


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, the workers that may get it, and the part of it that each of them holds.

    `why`: the reason, in one line, if the index was not used or the pool's records are stale. `followed`: the worker
    that another policy chose.
    """

    prompt: Prompt
    pool: Pool
    lookup: PromptLookup
    basis: Basis = Basis.COST
    why: str = ""
    followed: str | None = None
