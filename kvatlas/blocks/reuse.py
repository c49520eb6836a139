"""How much of a resident prefix an engine will really reuse: usable tokens.

Every engine recomputes at least the prompt's last token, because it needs the logits. What else is lost:

- vLLM (0.9 to 0.33): the hit is at most prompt - 1 tokens, cut to whole blocks; with EAGLE the last matched block is
  dropped as well, because the draft model needs its hidden states.
- SGLang (0.4.7 to 0.5.23): the hit is at most prompt - 1 tokens, cut to whole pages; with EAGLE the tree's keys are
  pairs of neighbouring tokens, of which there is one fewer.
- TensorRT-LLM (1.2, 1.3rc): at most prompt - 1 tokens; only full blocks are in the index.
- LMCache (0.5.6): a full hit is shortened by one token and is not cut to blocks.
- mock: as vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import EngineEndpoint, EngineKind


@dataclass(frozen=True, slots=True)
class ReuseRule:
    """One engine's rule.

    `recomputed_tokens` at the prompt's end are never reused; `block_aligned` cuts the rest to whole blocks; then
    `dropped_blocks` are dropped from the hit. Raises InvalidValue for a negative number.
    """

    recomputed_tokens: int = 1
    block_aligned: bool = True
    dropped_blocks: int = 0

    def __post_init__(self) -> None:
        if self.recomputed_tokens < 0 or self.dropped_blocks < 0:
            raise InvalidValue(f"reuse rule {self}; expected no negative number")

    def usable_tokens(self, resident_tokens: int, prompt_tokens: int, block_size: int) -> int:
        """Tokens of a resident prefix that the engine does not recompute."""
        usable = min(resident_tokens, prompt_tokens - self.recomputed_tokens)
        if self.block_aligned:
            usable -= usable % block_size
        return max(0, usable - self.dropped_blocks * block_size)


@cache
def default_rule(kind: EngineKind, *, eagle: bool = False) -> ReuseRule:
    """The rule of an engine kind, with or without EAGLE speculation. Sources: this module's docstring."""
    if kind is EngineKind.LMCACHE:
        return ReuseRule(block_aligned=False)
    if kind is EngineKind.SGLANG:
        return ReuseRule(recomputed_tokens=2 if eagle else 1)
    return ReuseRule(dropped_blocks=1 if eagle else 0)


@dataclass(frozen=True, slots=True)
class ReuseRules:
    """The rule of each worker: its own, else that of its engine kind, else the kind's default."""

    by_worker: Mapping[str, ReuseRule] = field(default_factory=dict)
    by_kind: Mapping[EngineKind, ReuseRule] = field(default_factory=dict)

    def of(self, endpoint: EngineEndpoint) -> ReuseRule:
        rule = self.by_worker.get(endpoint.id) or self.by_kind.get(endpoint.kind)
        return rule or default_rule(endpoint.kind, eagle=endpoint.eagle)
