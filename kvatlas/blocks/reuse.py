"""Usable tokens: how much of a resident prefix an engine will actually reuse.

Every engine recomputes at least the prompt's last token, because it needs the logits. There are further losses:

- vLLM (0.9 to 0.33): the hit is at most prompt - 1 tokens, rounded down to whole blocks. With EAGLE and without lookahead
  hashes (0.33's default without a KV connector), one block is dropped, because the draft model needs its hidden states. Models
  with one KV cache group drop it after the rounding (`UnitaryKVCacheCoordinator`), models with several groups before it
  (`HybridKVCacheCoordinator`). With several block sizes, the rest is rounded down to the scheduler's block size.
- SGLang (0.5.7 to 0.5.23): the hit is at most prompt - 1 tokens, rounded down to whole pages. With EAGLE, the tree's keys are
  pairs of adjacent tokens (a hash also covers the token after its block), so there is one key fewer than there are tokens.
- TensorRT-LLM (1.2, 1.3rc): the hit is at most prompt - 1 tokens; only full blocks are in the index.
- LMCache (0.5.6): a full hit is shortened by one token, and is not rounded down to blocks.
- mock: like vLLM.

For a hybrid model, residency is only an upper bound: the model's marks show where a prompt can resume
(`kvatlas.blocks.kv_cache_groups`). A request can also forbid reuse, entirely or from some token on: `CacheReading`.
"""

from collections.abc import Mapping
from dataclasses import field
from functools import cache

from kvatlas.dataclass import dataclass
from kvatlas.errors import InvalidValue
from kvatlas.fleet.records import EngineEndpoint, EngineKind


@dataclass(frozen=True, slots=True)
class ReuseRule:
    """The rule of one engine.

    `recomputed_tokens` at the prompt's end are never reused. If `block_aligned` is set, the rest is rounded down to whole
    blocks, or to multiples of `alignment_tokens` unless that is 0. `dropped_blocks` are dropped from the hit or, if
    `drops_resident` is set, from the resident prefix before anything else. `share`: the fraction of the rest that counts; below
    1 for an upper bound that answers have corrected. Raises InvalidValue for a negative number.
    """

    recomputed_tokens: int = 1
    block_aligned: bool = True
    dropped_blocks: int = 0
    drops_resident: bool = False
    alignment_tokens: int = 0
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.recomputed_tokens < 0 or self.dropped_blocks < 0 or self.alignment_tokens < 0 or self.share < 0:
            raise InvalidValue(f"reuse rule {self}; expected no negative number")

    def usable_tokens(
        self, resident_tokens: int, prompt_tokens: int, block_size: int, readable_tokens: int | None = None
    ) -> int:
        """The number of tokens of a resident prefix that the engine does not recompute.

        `readable_tokens`: the number of tokens that the request allows the engine to read from its cache (`CacheReading`);
        None: all.
        """
        dropped = self.dropped_blocks * block_size
        limit = self.limit_tokens(prompt_tokens, readable_tokens)
        usable = min(resident_tokens - dropped, limit) if self.drops_resident else min(resident_tokens, limit) - dropped
        if self.share < 1:
            usable = int(usable * self.share)
        if self.alignment_tokens:
            usable -= usable % self.alignment_tokens
        elif self.block_aligned:
            usable -= usable % block_size
        return max(0, usable)

    def limit_tokens(self, prompt_tokens: int, readable_tokens: int | None = None) -> int:
        """The maximum number of a prompt's tokens that can be reused."""
        limit = prompt_tokens - self.recomputed_tokens
        return max(0, limit if readable_tokens is None else min(limit, readable_tokens))


@dataclass(frozen=True, slots=True)
class CacheReading:
    """A request's limits on reading the engine's prefix cache, in the engines' own parameters.

    `skip`: vLLM's `skip_reading_prefix_cache`. `prompt_logprobs`: the request asks for log probabilities of the prompt
    (vLLM: cached tokens have none, so the cache is not read unless `skip` is False). `logprob_start_len`: SGLang's, with
    `return_logprob`: the prompt is computed from this token on; -1: no log probabilities of the prompt.
    """

    skip: bool | None = None
    prompt_logprobs: bool = False
    logprob_start_len: int = -1

    def readable_tokens(self, kind: EngineKind) -> int | None:
        """How many of the prompt's first tokens this kind of engine may read from its cache; None: all."""
        if kind is EngineKind.SGLANG:
            return self.logprob_start_len if self.logprob_start_len >= 0 else None
        if kind in (EngineKind.VLLM, EngineKind.MOCK):
            return 0 if (self.prompt_logprobs if self.skip is None else self.skip) else None
        return None


ALL_READABLE = CacheReading()
"""The reading of a request that sets no limits."""


@cache
def default_rule(
    kind: EngineKind,
    *,
    eagle: bool = False,
    lookahead_tokens: int = 0,
    several_groups: bool = False,
    alignment_tokens: int = 0,
) -> ReuseRule:
    """The rule of an engine kind, with or without EAGLE speculation (without lookahead hashes), for a model with one or several
    KV cache groups. The sources are given in this module's docstring."""
    if kind is EngineKind.LMCACHE:
        return ReuseRule(block_aligned=False)
    if kind is EngineKind.SGLANG:
        return ReuseRule(recomputed_tokens=2 if eagle or lookahead_tokens else 1)
    return ReuseRule(
        dropped_blocks=1 if eagle else 0,
        drops_resident=eagle and several_groups,
        alignment_tokens=alignment_tokens,
    )


@dataclass(frozen=True, slots=True)
class ReuseRules:
    """The rule of each worker: its own one; otherwise the one set for its engine kind; otherwise the default of that kind."""

    by_worker: Mapping[str, ReuseRule] = field(default_factory=dict)
    by_kind: Mapping[EngineKind, ReuseRule] = field(default_factory=dict)

    def of(self, endpoint: EngineEndpoint) -> ReuseRule:
        rule = self.by_worker.get(endpoint.id) or self.by_kind.get(endpoint.kind)
        return rule or default_rule(
            endpoint.kind,
            eagle=endpoint.eagle,
            lookahead_tokens=endpoint.lookahead_tokens,
            several_groups=endpoint.groups > 1,
            alignment_tokens=endpoint.alignment_tokens,
        )
