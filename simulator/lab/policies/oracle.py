"""The oracle: sees the caches themselves, what is being computed, every queue, and the engines' true step costs."""

from collections.abc import Sequence

from kvatlas.validation import DEFAULT_DECODE_TOKENS
from kvatlas_simulator.engine.step_cost import StepCost
from kvatlas_simulator.lab.engine import EngineRequest, VirtualEngine
from kvatlas_simulator.lab.policies.protocol import LoadBlind
from kvatlas_simulator.lab.requests import LabRequest, written, written_tokens


class Oracle(LoadBlind):
    """Sends each request to the engine that would answer it first, judging by the state at its arrival. It knows neither
    later requests nor the lengths of answers, so its choice is the best possible for one request, but not a bound for the
    whole workload."""

    def __init__(self, engines: Sequence[VirtualEngine], cost: StepCost) -> None:
        self._engines = engines
        self._cost = cost

    def choose(self, request: LabRequest, now_us: float) -> int:
        up = [number for number, engine in enumerate(self._engines) if engine.up]
        return min(up, key=lambda number: self._score_us(self._engines[number], request))

    def _score_us(self, engine: VirtualEngine, request: LabRequest) -> float:
        cost, ahead = self._cost, engine.unprefilled
        cached, computing = self._held_tokens(engine, request, ahead)
        queued = sum(engine.uncached_tokens(one) for one in ahead)
        new = request.input_tokens - max(cached, computing)
        running = len(engine.running) + len(engine.waiting)
        kv_tokens = engine.kv_tokens + sum(one.request.input_tokens for one in engine.waiting)
        step_us = cost.decode_us_per_sequence * running + cost.decode_us_per_kv_token * kv_tokens
        pairs = new * (request.input_tokens - new / 2)
        prefill_us = cost.prefill_us_per_token * (queued + new) + cost.attention_us_per_token_pair * pairs
        return prefill_us + DEFAULT_DECODE_TOKENS * step_us

    def _held_tokens(
        self, engine: VirtualEngine, request: LabRequest, ahead: Sequence[EngineRequest]
    ) -> tuple[int, int]:
        """Tokens of the prompt in the engine's cache, and those that it will compute before it gets to this request."""
        size = engine.block_tokens
        content = written(request.contents)[: written_tokens(request.input_tokens, size)]
        cached = engine.cached_tokens(content, request.identity.namespace)
        mine, computing = request.prompt_contents(size), 0
        for one in ahead:
            if one.request.identity == request.identity:
                theirs = one.request.contents
                common = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(mine))
                usable = min(common, (request.input_tokens - 1) // size)
                if usable * size > max(cached, computing):
                    computing = max(computing, engine.blocks_once_computed(one, usable) * size)
        return cached, computing
