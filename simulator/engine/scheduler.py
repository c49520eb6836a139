"""The engine's scheduler: continuous batching with chunked prefill over the paged cache, without clock or I/O.

As vLLM's: running sequences come first, then waiting ones in order of arrival; a step computes at most a budget of
tokens; when blocks run out the youngest running sequence is preempted and recomputed later; a prompt whose blocks are
all cached still computes its last block, because the last token's output is needed; an output token's own KV is
computed by the step after it, so an answer's last token never gets into a block.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from simulator.cache.block_changes import BlockChange
from simulator.cache.kv_cache import KVCache, PrefixMatch
from simulator.cache.stats import MemoryPressure
from simulator.engine.generation import GeneratedToken, GenerationRequest, QueueFull, RequestTooLarge
from simulator.engine.step_cost import StepCost
from simulator.engine.tokenizer import AnswerTokens


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What one engine takes on at a time."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192
    queue_limit: int = 1_024
    """Waiting requests; a preempted sequence always finds room."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Sequences and counters, as an engine's metrics tell them."""

    running: int
    waiting: int
    prompt_tokens_total: int
    """Prompt tokens that were computed or found."""
    generation_tokens_total: int
    prefix_queries_tokens_total: int
    prefix_hits_tokens_total: int
    preemptions_total: int


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step did. Times are the engine's own microseconds."""

    started_us: float
    ended_us: float
    prefill_tokens: int
    decode_sequences: int
    swapped_in_blocks: int
    preempted: int
    tokens: tuple[GeneratedToken, ...]
    changes: tuple[BlockChange, ...]
    """Of the cache since the last step's end; to be published now, in one batch if there are any."""


class _Sequence:
    """One answer in the making."""

    __slots__ = (
        "answer",
        "cached_tokens",
        "choice",
        "computed",
        "ended",
        "forks_due",
        "match",
        "prefilling",
        "request",
        "sequence_id",
        "tokens",
    )

    def __init__(self, request: GenerationRequest, choice: int, answer: AnswerTokens) -> None:
        self.request = request
        self.choice = choice
        self.answer = answer
        self.sequence_id = f"{request.request_id}/{choice}"
        self.tokens = list(request.prompt)
        self.computed = 0
        self.cached_tokens: int | None = None
        self.forks_due = 0
        self.match: PrefixMatch | None = None
        """What was found for it when there was no room yet."""
        self.prefilling = True
        self.ended = False

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


@dataclass(slots=True)
class _Step:
    """A step between its schedule and its end."""

    started_us: float
    duration_us: float
    computing: list[_Sequence]
    prefill_tokens: int
    decode_sequences: int
    swapped_in_blocks: int
    preempted: int

    @property
    def ended_us(self) -> float:
        return self.started_us + self.duration_us


class EngineCore:
    """One engine's queues and cache. Call `step`, or `begin_step` and `end_step` where time passes between them."""

    def __init__(
        self,
        cache: KVCache,
        *,
        model: str = "mock",
        limits: SchedulerLimits | None = None,
        cost: StepCost | None = None,
        vocab_size: int = 128_256,
    ) -> None:
        self.cache = cache
        self._model = model
        self._limits = limits or SchedulerLimits()
        self._cost = cost or StepCost()
        self._vocab_size = vocab_size
        self._waiting: deque[_Sequence] = deque()
        self._running: list[_Sequence] = []
        self._prompt_tokens = self._generation_tokens = 0
        self._queried_tokens = self._hit_tokens = self._preemptions = 0

    # --- requests

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def load(self) -> EngineLoad:
        return EngineLoad(
            running=len(self._running),
            waiting=len(self._waiting),
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generation_tokens,
            prefix_queries_tokens_total=self._queried_tokens,
            prefix_hits_tokens_total=self._hit_tokens,
            preemptions_total=self._preemptions,
        )

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Raises QueueFull, and RequestTooLarge for one that can never run."""
        total = len(request.prompt) + request.max_tokens
        if not request.prompt:
            raise RequestTooLarge("the prompt is empty; expected at least one token")
        if total > self.cache.capacity_tokens:
            raise RequestTooLarge(
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} output tokens need {total} slots; "
                f"expected at most {self.cache.capacity_tokens}"
            )
        if request.choices > self._limits.max_num_seqs:
            raise RequestTooLarge(f"n is {request.choices}; expected at most {self._limits.max_num_seqs}")
        if len(self._waiting) >= self._limits.queue_limit:
            raise QueueFull(
                f"{len(self._waiting)} requests are waiting; expected fewer than {self._limits.queue_limit}"
            )
        sequence = _Sequence(request, 0, self._answer(request, 0))
        sequence.forks_due = request.choices - 1
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> None:
        """Give up a request, wherever it is; unknown and finished ones are ignored."""
        for sequence in [*self._running, *self._waiting]:
            if sequence.request.request_id == request_id:
                self._end(sequence)

    def reset_prefix_cache(self, *, preempt_running: bool = False, include_cpu: bool = False) -> bool:
        """Forget everything cached. False, and nothing changed, while sequences hold blocks and may not be preempted.

        What it changed is in the next step's result, or in `take_changes`.
        """
        if preempt_running:
            while self._running:
                self._preempt(self._running.pop())
        return self.cache.reset(include_cpu=include_cpu)

    def take_changes(self) -> tuple[BlockChange, ...]:
        """Changes that no step has reported."""
        return self.cache.take_changes()

    # --- steps

    def step(self, now_us: float) -> StepResult:
        """Schedule and compute one step."""
        return self.end_step(self.begin_step(now_us))

    def begin_step(self, now_us: float) -> _Step:
        """Choose what is computed from now on, and take the blocks for it. There must be work."""
        step = _Step(now_us, 0.0, [], 0, 0, 0, 0)
        budget = self._continue_running(step, self._limits.max_num_batched_tokens)
        if not step.preempted:
            self._admit_waiting(step, budget)
        if not step.computing:
            raise RuntimeError(f"nothing to schedule with {len(self._running)} running, {len(self._waiting)} waiting")
        step.duration_us = self._cost.step_us(
            prefill_tokens=step.prefill_tokens,
            decode_sequences=step.decode_sequences,
            decode_kv_tokens=sum(sequence.computed for sequence in step.computing if not sequence.prefilling),
            swapped_in=step.swapped_in_blocks,
        )
        return step

    def end_step(self, step: _Step) -> StepResult:
        """What the step gave. Sequences that were given up or preempted in the meantime give nothing."""
        tokens: list[GeneratedToken] = []
        for sequence in step.computing:
            if sequence.ended or sequence.computed < len(sequence.tokens):
                continue
            sequence.prefilling = False
            for fork in self._forks(sequence):
                tokens.append(self._generate(fork))
            tokens.append(self._generate(sequence))
        return StepResult(
            started_us=step.started_us,
            ended_us=step.ended_us,
            prefill_tokens=step.prefill_tokens,
            decode_sequences=step.decode_sequences,
            swapped_in_blocks=step.swapped_in_blocks,
            preempted=step.preempted,
            tokens=tuple(tokens),
            changes=self.cache.take_changes(),
        )

    def _continue_running(self, step: _Step, budget: int) -> int:
        """Schedule running sequences, preempting the youngest while blocks are lacking; the budget that is left."""
        index = 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            count = min(len(sequence.tokens) - sequence.computed, budget)
            while not self.cache.write(sequence.sequence_id, self._next_tokens(sequence, count)):
                victim = self._running.pop()
                step.preempted += 1
                self._preempt(victim)
                if victim is sequence:
                    return budget
            self._computes(step, sequence, count)
            budget -= count
            index += 1
        return budget

    def _admit_waiting(self, step: _Step, budget: int) -> None:
        """Schedule waiting sequences in order while slots, blocks and budget last."""
        while self._waiting and budget > 0:
            sequence = self._waiting[0]
            slots = sum(1 + running.forks_due for running in self._running)
            if slots + 1 + sequence.forks_due > self._limits.max_num_seqs:
                return
            # At critical pressure a newcomer would soon be preempted, or make others so.
            if self._running and self.cache.pressure is MemoryPressure.CRITICAL:
                return
            match = self.cache.match(sequence.tokens, sequence.request.namespace, sequence.match)
            count = min(len(sequence.tokens) - match.hit_tokens, budget)
            if not self.cache.can_open(match, count):
                sequence.match = match
                return
            sequence.match = None
            self._waiting.popleft()
            step.swapped_in_blocks += self.cache.swap_ins(match)
            first_time = sequence.cached_tokens is None
            self.cache.open(sequence.sequence_id, match, count_lookup=first_time)
            if first_time:
                sequence.cached_tokens = match.hit_tokens
                self._queried_tokens += match.prompt_tokens
                self._hit_tokens += match.hit_tokens
            sequence.computed = match.hit_tokens
            self._running.append(sequence)
            if not self.cache.write(sequence.sequence_id, self._next_tokens(sequence, count)):
                raise RuntimeError("the cache promised blocks that it doesn't have")
            self._computes(step, sequence, count)
            budget -= count

    def _computes(self, step: _Step, sequence: _Sequence, count: int) -> None:
        sequence.computed += count
        step.computing.append(sequence)
        if sequence.prefilling:
            step.prefill_tokens += count
        else:
            step.decode_sequences += 1

    def _next_tokens(self, sequence: _Sequence, count: int) -> Sequence[int]:
        return sequence.tokens[sequence.computed : sequence.computed + count]

    def _forks(self, sequence: _Sequence) -> Iterator[_Sequence]:
        """The other answers of a request whose prompt is computed now: they share its blocks."""
        for choice in range(1, sequence.forks_due + 1):
            fork = _Sequence(sequence.request, choice, self._answer(sequence.request, choice))
            fork.computed = sequence.computed
            fork.cached_tokens = sequence.cached_tokens
            fork.prefilling = False
            self.cache.fork(sequence.sequence_id, fork.sequence_id)
            self._running.append(fork)
            yield fork
        sequence.forks_due = 0

    def _generate(self, sequence: _Sequence) -> GeneratedToken:
        if sequence.generated == 0 and sequence.choice == 0:
            self._prompt_tokens += len(sequence.request.prompt)
        token = sequence.answer[sequence.generated]
        sequence.tokens.append(token)
        self._generation_tokens += 1
        finished = sequence.generated >= sequence.request.max_tokens
        if finished:
            self._end(sequence)
        return GeneratedToken(
            request_id=sequence.request.request_id,
            choice=sequence.choice,
            token_id=token,
            cached_tokens=sequence.cached_tokens or 0,
            finish_reason="length" if finished else None,
        )

    def _preempt(self, sequence: _Sequence) -> None:
        """Take a sequence's blocks away; it waits before all others and computes again what the cache then lacks."""
        self.cache.release(sequence.sequence_id)
        sequence.computed = 0
        sequence.prefilling = True
        self._preemptions += 1
        self._waiting.appendleft(sequence)

    def _end(self, sequence: _Sequence) -> None:
        sequence.ended = True
        if sequence in self._running:
            self._running.remove(sequence)
            self.cache.release(sequence.sequence_id)
        else:
            self._waiting.remove(sequence)

    def _answer(self, request: GenerationRequest, choice: int) -> AnswerTokens:
        name = f"{self._model}\0{request.namespace.adapter or ''}"
        return AnswerTokens(name, request.prompt, choice, self._vocab_size)
