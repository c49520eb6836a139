"""The engine's scheduler: continuous batching with chunked prefill over the paged cache.

As in vLLM: running sequences come first, then waiting ones in order of arrival, each once its whole prompt fits in the
cache. A step computes at most a budget of tokens. When blocks run out, the youngest running sequence is preempted and
recomputed later. A prompt whose blocks are all cached still computes its last block, because the last token's output is
needed. An output token's own KV is computed by the step after it, so an answer's last token is never in a block.

`tests/data/schedules` has schedules that vLLM's own scheduler made; this one makes the same ones.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvatlas_simulator.cache.allocation import AllocationRequest
from kvatlas_simulator.cache.sequence_blocks import PrefixMatch
from kvatlas_simulator.engine.engine_cache import EngineCache
from kvatlas_simulator.engine.generation_request import GenerationRequest, QueueFull, RequestTooLarge
from kvatlas_simulator.engine.tokenizer import Answer


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Limits of one engine's concurrent work."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8_192
    queue_limit: int = 1_024
    """Maximum number of waiting requests; a preempted sequence is always queued again."""


class EngineSequence:
    """A request's prompt and one of its answers, as far as it has been generated."""

    __slots__ = (
        "answer",
        "cached_tokens",
        "choice",
        "computed",
        "ended",
        "forks_due",
        "match",
        "prefilling",
        "received_tokens",
        "request",
        "sequence_id",
        "tokens",
    )

    def __init__(self, request: GenerationRequest, choice: int, answer: Answer) -> None:
        self.request = request
        self.choice = choice
        self.answer = answer
        self.sequence_id = f"{request.request_id}/{choice}"
        self.tokens = list(request.prompt)
        self.computed = 0
        self.received_tokens = min(request.received_tokens, len(request.prompt) - 1)
        """Received tokens that no preemption has lost."""
        self.cached_tokens: int | None = None
        self.forks_due = 0
        """How many sequences start from this one when its prompt is computed."""
        self.match: PrefixMatch | None = None
        """The match of the last attempt to admit it, which failed for lack of blocks."""
        self.prefilling = True
        self.ended = False

    @property
    def generated(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def remaining(self) -> int:
        """Number of tokens that are known but not computed yet."""
        return len(self.tokens) - self.computed

    def next_tokens(self, count: int) -> Sequence[int]:
        return self.tokens[self.computed : self.computed + count]


@dataclass(slots=True)
class Batch:
    """The work of one step: chunks of prompts, and one token for every decoding sequence."""

    sequences: list[EngineSequence] = field(default_factory=list)
    prefill_tokens: int = 0
    prefill_pairs: float = 0.0
    """Number of pairs of a computed prompt token and a token before it."""
    decode_sequences: int = 0
    swapped_in_blocks: int = 0
    preempted: int = 0

    @property
    def decode_kv_tokens(self) -> int:
        return sum(sequence.computed for sequence in self.sequences if not sequence.prefilling)

    def add(self, sequence: EngineSequence, count: int, received: int = 0) -> None:
        """Compute the sequence's next `count` tokens, except the first `received`, whose KV came from elsewhere."""
        new = count - received
        sequence.computed += count
        self.sequences.append(sequence)
        if sequence.prefilling:
            self.prefill_tokens += new
            self.prefill_pairs += new * (sequence.computed - new / 2)
        else:
            self.decode_sequences += 1


class Scheduler:
    """The queues of one engine, and the blocks that its sequences hold."""

    def __init__(self, cache: EngineCache, limits: SchedulerLimits) -> None:
        self._cache = cache
        self._limits = limits
        self._waiting: deque[EngineSequence] = deque()
        self._running: list[EngineSequence] = []
        self._held: dict[str, str] = {}
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.preemptions = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def check(self, request: GenerationRequest) -> None:
        """Check that a request can be queued. Raises QueueFull, or RequestTooLarge for one that can never run."""
        total = len(request.prompt) + request.max_tokens
        if not request.prompt:
            raise RequestTooLarge("the prompt is empty; expected at least one token")
        if total > self._cache.capacity_tokens:
            raise RequestTooLarge(
                f"{len(request.prompt)} prompt tokens and {request.max_tokens} output tokens need {total} slots; "
                f"expected at most {self._cache.capacity_tokens}"
            )
        if request.choices > self._limits.max_num_seqs:
            raise RequestTooLarge(f"n is {request.choices}; expected at most {self._limits.max_num_seqs}")
        if len(self._waiting) >= self._limits.queue_limit:
            raise QueueFull(
                f"{len(self._waiting)} requests are waiting; expected fewer than {self._limits.queue_limit}"
            )

    def enqueue(self, sequence: EngineSequence) -> None:
        """Add a sequence to the end of the queue."""
        self._waiting.append(sequence)

    def fork(self, source: EngineSequence, fork: EngineSequence) -> None:
        """Run `fork` from now on; it shares the blocks of `source`."""
        self._cache.fork(source.sequence_id, fork.sequence_id)
        self._running.append(fork)

    def sequences_of(self, request_id: str) -> list[EngineSequence]:
        return [one for one in [*self._running, *self._waiting] if one.request.request_id == request_id]

    def end(self, sequence: EngineSequence) -> None:
        """Remove a sequence and release its blocks."""
        sequence.ended = True
        if sequence in self._running:
            self._running.remove(sequence)
            if sequence.request.holds and sequence.generated:
                self._held[sequence.request.request_id] = sequence.sequence_id
            else:
                self._cache.free(sequence.sequence_id)
        else:
            self._waiting.remove(sequence)

    def release(self, request_id: str) -> bool:
        """Free the blocks of an ended request that holds them. Returns False for any other request."""
        sequence_id = self._held.pop(request_id, None)
        if sequence_id is not None:
            self._cache.free(sequence_id)
        return sequence_id is not None

    def preempt_all(self) -> None:
        """Preempt every running sequence."""
        while self._running:
            self._preempt(self._running.pop())

    def schedule(self) -> Batch:
        """Choose what the next step computes, and allocate the blocks for it. There must be work."""
        batch = Batch()
        budget = self._continue_running(batch, self._limits.max_num_batched_tokens)
        if not batch.preempted:
            self._admit_waiting(batch, budget)
        while not batch.sequences and self._held:  # blocks that other engines have not fetched yet have to make way
            self.release(next(iter(self._held)))
            self._admit_waiting(batch, budget)
        if not batch.sequences:
            raise RuntimeError(f"nothing to schedule with {len(self._running)} running, {len(self._waiting)} waiting")
        return batch

    def _continue_running(self, batch: Batch, budget: int) -> int:
        """Schedule running sequences; preempt the youngest ones while there are too few blocks. Returns the remaining
        budget."""
        index = 0
        while index < len(self._running) and budget > 0:
            sequence = self._running[index]
            count = min(sequence.remaining, budget)
            while not self._cache.can_extend(sequence.sequence_id, count):
                victim = self._running.pop()
                batch.preempted += 1
                self._preempt(victim)
                if victim is sequence:
                    return budget
            self._cache.extend(sequence.sequence_id, sequence.next_tokens(count))
            batch.add(sequence, count)
            budget -= count
            index += 1
        return budget

    def _admit_waiting(self, batch: Batch, budget: int) -> None:
        """Schedule waiting sequences in order as long as slots, blocks and budget last."""
        while self._waiting and budget > 0:
            sequence = self._waiting[0]
            slots = sum(1 + running.forks_due for running in self._running)
            if slots + 1 + sequence.forks_due > self._limits.max_num_seqs:
                return
            match = self._cache.match(sequence.tokens, sequence.request.namespace, sequence.match)
            received = max(0, sequence.received_tokens - match.hit_tokens)
            count = received + min(len(sequence.tokens) - match.hit_tokens - received, budget)
            request = AllocationRequest(
                sequence.sequence_id, sequence.tokens, sequence.request.namespace, first_chunk=count
            )
            if not self._cache.can_admit(request, match, self._limits.max_num_batched_tokens):
                sequence.match = match
                return
            sequence.match = None
            self._waiting.popleft()
            batch.swapped_in_blocks += self._cache.swap_ins(match)
            first_time = sequence.cached_tokens is None
            self._cache.allocate(request, match, count_lookup=first_time)
            if first_time:
                sequence.cached_tokens = match.hit_tokens + received
                self.queried_tokens += match.prompt_tokens
                self.hit_tokens += match.hit_tokens
            sequence.computed = match.hit_tokens
            self._running.append(sequence)
            batch.add(sequence, count, received)
            budget -= count - received

    def _preempt(self, sequence: EngineSequence) -> None:
        """Release a sequence's blocks. It goes to the front of the queue, and recomputes what the cache has lost by then."""
        self._cache.free(sequence.sequence_id)
        sequence.computed = 0
        sequence.received_tokens = 0
        sequence.prefilling = True
        self.preemptions += 1
        self._waiting.appendleft(sequence)
