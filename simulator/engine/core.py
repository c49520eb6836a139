"""One engine without a clock or I/O. It takes requests, computes steps in simulated time, and generates synthetic
tokens."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvatlas_simulator.cache.kv_events import KVEvent
from kvatlas_simulator.engine.engine_cache import EngineCache
from kvatlas_simulator.engine.generation_request import GeneratedToken, GenerationRequest
from kvatlas_simulator.engine.scheduler import Batch, EngineSequence, Scheduler, SchedulerLimits
from kvatlas_simulator.engine.step_cost import StepCost
from kvatlas_simulator.engine.tokenizer import AnswerTokens, TextAnswer


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The sequences and counters that an engine's metrics report."""

    running: int
    waiting: int
    prompt_tokens_total: int
    """Prompt tokens that were computed or found in the cache."""
    generation_tokens_total: int
    prefix_queries_tokens_total: int
    prefix_hits_tokens_total: int
    preemptions_total: int


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has begun. Times are the engine's own microseconds."""

    batch: Batch
    started_us: float
    ended_us: float


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step. Times are the engine's own microseconds."""

    started_us: float
    ended_us: float
    prefill_tokens: int
    decode_sequences: int
    swapped_in_blocks: int
    preempted: int
    tokens: tuple[GeneratedToken, ...]
    events: tuple[KVEvent, ...]
    """The cache's events since the end of the last step. Publish them now, in one batch, unless empty."""


class EngineCore:
    """One engine's scheduler and cache. Call `step`, or `begin_step` and `end_step` if time passes between them."""

    def __init__(
        self,
        cache: EngineCache,
        *,
        model: str = "mock",
        limits: SchedulerLimits | None = None,
        cost: StepCost | None = None,
        vocab_size: int = 128_256,
        answers_text: bool = False,
    ) -> None:
        """`answers_text`: the engine's answers are `TextAnswer`s."""
        self._answers_text = answers_text
        self.cache = cache
        self._scheduler = Scheduler(cache, limits or SchedulerLimits())
        self._model = model
        self._cost = cost or StepCost()
        self._vocab_size = vocab_size
        self._prompt_tokens = self._generation_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.waiting or self._scheduler.running)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(
            running=self._scheduler.running,
            waiting=self._scheduler.waiting,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generation_tokens,
            prefix_queries_tokens_total=self._scheduler.queried_tokens,
            prefix_hits_tokens_total=self._scheduler.hit_tokens,
            preemptions_total=self._scheduler.preemptions,
        )

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises QueueFull, or RequestTooLarge for a request that can never run."""
        self._scheduler.check(request)
        sequence = self._new_sequence(request, 0)
        sequence.forks_due = request.choices - 1
        self._scheduler.enqueue(sequence)

    def abort(self, request_id: str) -> None:
        """End a running or waiting request; unknown and finished ones are ignored."""
        for sequence in self._scheduler.sequences_of(request_id):
            self._scheduler.end(sequence)

    def release(self, request_id: str) -> bool:
        """Free the blocks that an ended request holds. Returns False if it holds none (any more)."""
        return self._scheduler.release(request_id)

    def reset_prefix_cache(self, *, preempt_running: bool = False, include_cpu: bool = False) -> bool:
        """Drop every cached block. Returns False and changes nothing if sequences hold blocks and may not be preempted.

        Its events are in the next step's result, or in `take_events`.
        """
        if preempt_running:
            self._scheduler.preempt_all()
        return self.cache.reset(include_cpu=include_cpu)

    def take_events(self) -> tuple[KVEvent, ...]:
        """Events that no step has reported yet."""
        return self.cache.take_events()

    def step(self, now_us: float) -> StepResult:
        """Schedule and compute one step."""
        return self.end_step(self.begin_step(now_us))

    def begin_step(self, now_us: float) -> Step:
        """Choose what to compute next, and allocate the blocks for it. The engine must have work."""
        batch = self._scheduler.schedule()
        duration_us = self._cost.step_us(
            prefill_tokens=batch.prefill_tokens,
            decode_sequences=batch.decode_sequences,
            decode_kv_tokens=batch.decode_kv_tokens,
            swapped_in=batch.swapped_in_blocks,
            prefill_pairs=batch.prefill_pairs,
        )
        return Step(batch, now_us, now_us + duration_us)

    def end_step(self, step: Step) -> StepResult:
        """Generate the step's tokens. Sequences that have been aborted or preempted since the step began get none."""
        tokens: list[GeneratedToken] = []
        for sequence in step.batch.sequences:
            if sequence.ended or sequence.remaining:
                continue
            sequence.prefilling = False
            for fork in self._forks(sequence):
                tokens.append(self._generate(fork))
            tokens.append(self._generate(sequence))
        return StepResult(
            started_us=step.started_us,
            ended_us=step.ended_us,
            prefill_tokens=step.batch.prefill_tokens,
            decode_sequences=step.batch.decode_sequences,
            swapped_in_blocks=step.batch.swapped_in_blocks,
            preempted=step.batch.preempted,
            tokens=tuple(tokens),
            events=self.cache.take_events(),
        )

    def _forks(self, sequence: EngineSequence) -> Iterator[EngineSequence]:
        """Begin the other answers to a request whose prompt has just been computed; they share its blocks."""
        for choice in range(1, sequence.forks_due + 1):
            fork = self._new_sequence(sequence.request, choice)
            fork.computed = sequence.computed
            fork.cached_tokens = sequence.cached_tokens
            fork.prefilling = False
            self._scheduler.fork(sequence, fork)
            yield fork
        sequence.forks_due = 0

    def _generate(self, sequence: EngineSequence) -> GeneratedToken:
        if sequence.generated == 0 and sequence.choice == 0:
            self._prompt_tokens += len(sequence.request.prompt)
        token = sequence.answer[sequence.generated]
        sequence.tokens.append(token)
        self._generation_tokens += 1
        finished = sequence.generated >= sequence.request.max_tokens
        if finished:
            self._scheduler.end(sequence)
        return GeneratedToken(
            request_id=sequence.request.request_id,
            choice=sequence.choice,
            token_id=token,
            cached_tokens=sequence.cached_tokens or 0,
            finish_reason="length" if finished else None,
        )

    def _new_sequence(self, request: GenerationRequest, choice: int) -> EngineSequence:
        name = f"{self._model}\0{request.namespace.adapter or ''}"
        if self._answers_text:
            return EngineSequence(request, choice, TextAnswer(name, request.prompt, request.seed + choice))
        return EngineSequence(request, choice, AnswerTokens(name, request.prompt, choice, self._vocab_size))
