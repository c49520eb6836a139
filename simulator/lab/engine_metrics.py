"""Loads as publishers read them: vLLM's metrics show running and waiting requests, and the blocks in use; SGLang's also show
the request slots."""

from kvatlas.fleet.records import ForwardPassMetrics, WorkerState
from kvatlas_simulator.lab.engine import VirtualEngine


class EngineMetrics:
    """Metrics of one fleet. They show no queued tokens: a waiting request counts as many tokens as the mean finished prompt.
    `slots`: they show the request slots."""

    def __init__(self, *, slots: bool = False) -> None:
        self._slots = slots
        self._prompt_tokens = self._prompts = 0

    def record_finish(self, prompt_tokens: int) -> None:
        self._prompt_tokens += prompt_tokens
        self._prompts += 1

    def read(self, worker_id: str, engine: VirtualEngine, sampled_us: int) -> WorkerState:
        """An engine's load now."""
        running, waiting = len(engine.running), len(engine.waiting)
        queued_tokens = int(waiting * (self._prompt_tokens / max(1, self._prompts)))
        slots = engine.request_slots if self._slots else 0
        return _state_of(worker_id, engine, running, waiting, queued_tokens, sampled_us, slots)


def read_true_load(worker_id: str, engine: VirtualEngine, sampled_us: int) -> WorkerState:
    """An engine's true load, including the tokens left to compute, which no metric shows."""
    queued_tokens = sum(map(engine.uncached_tokens, engine.unprefilled))
    return _state_of(worker_id, engine, len(engine.running) + len(engine.waiting), 0, queued_tokens, sampled_us)


def _state_of(
    worker_id: str,
    engine: VirtualEngine,
    running: int,
    waiting: int,
    queued_tokens: int,
    sampled_us: int,
    slots: int = 0,
) -> WorkerState:
    return WorkerState(
        id=worker_id,
        running_decodes=running,
        queued_prefill_tokens=queued_tokens,
        forward_pass=ForwardPassMetrics(
            active_request_slots=running,
            total_request_slots=slots,
            active_kv_blocks=engine.kv_tokens // engine.block_tokens,
            total_kv_blocks=engine.cache.num_blocks,
            requests_waiting=waiting,
        ),
        sampled_us=sampled_us,
    )
