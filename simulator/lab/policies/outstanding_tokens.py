"""Strong policies without events: they count an engine's outstanding prompt tokens, those of requests that have no first
token yet."""

import random
from collections.abc import Sequence

from kvatlas_simulator.lab.engine import EngineRequest, VirtualEngine
from kvatlas_simulator.lab.policies.approximate_trees import SentPrefixes, packed_chain
from kvatlas_simulator.lab.policies.protocol import OpenRequests
from kvatlas_simulator.lab.requests import LabRequest


class LeastPrefillTokens(OpenRequests):
    """The engine with the fewest outstanding prompt tokens; a random one among equals. Assumes that nothing is cached."""

    def __init__(self, engines: Sequence[VirtualEngine], rng: random.Random) -> None:
        super().__init__(engines, rng)
        self._queued = [0] * len(engines)
        self._sent: dict[int, int] = {}
        """Outstanding tokens by request."""

    def choose(self, request: LabRequest, now_us: float) -> int:
        new = self._new_tokens(request)
        chosen = self.least((engine, self._cost(engine, new[engine])) for engine in self.up)
        self._queued[chosen] += new[chosen]
        self._sent[request.number] = new[chosen]
        self._remember(request, chosen)
        return self.send(chosen)

    def record_first_token(self, sequence: EngineRequest, engine: int) -> None:
        self._queued[engine] -= self._sent.pop(sequence.request.number, 0)

    def record_loss(self, sequence: EngineRequest, engine: int, now_us: float) -> None:
        self.record_first_token(sequence, engine)
        super().record_loss(sequence, engine, now_us)

    def _new_tokens(self, request: LabRequest) -> list[int]:
        """Number of the prompt's tokens that each engine is expected to compute."""
        return [request.input_tokens] * len(self._queued)

    def _cost(self, engine: int, new_tokens: int) -> float:
        return self._queued[engine]

    def _remember(self, request: LabRequest, chosen: int) -> None:
        """Record that the request goes to this engine."""


class PrefixTokens(LeastPrefillTokens):
    """The engine with the fewest outstanding prompt tokens once this prompt is added, minus its guessed cache hits: caches
    are guessed from the prompts sent to each engine."""

    def __init__(self, engines: Sequence[VirtualEngine], rng: random.Random) -> None:
        super().__init__(engines, rng)
        self._block_tokens = engines[0].block_tokens
        self._prefixes = [SentPrefixes(engine.cache.num_blocks) for engine in engines]

    def _new_tokens(self, request: LabRequest) -> list[int]:
        chain, most = packed_chain(request, self._block_tokens), request.input_tokens - 1
        return [request.input_tokens - min(sent.matched(chain) * self._block_tokens, most) for sent in self._prefixes]

    def _cost(self, engine: int, new_tokens: int) -> float:
        return self._queued[engine] + new_tokens

    def _remember(self, request: LabRequest, chosen: int) -> None:
        self._prefixes[chosen].add(packed_chain(request, self._block_tokens))


class LMetric(PrefixTokens):
    """`PrefixTokens` times the number of the engine's open requests, including this one: prefill work × batch size.

    Source: D. Zhang et al., "LMetric: Simple is Better - Multiplication May Be All You Need for LLM Request Scheduling",
    arXiv:2603.15202, 2026.
    """

    def _cost(self, engine: int, new_tokens: int) -> float:
        return (self._queued[engine] + new_tokens) * (self.open[engine] + 1)
