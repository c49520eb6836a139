"""An engine in virtual time: the simulator's cache and scheduler rules, at the cost of a few events per request.

It decides like `kvatlas_simulator.engine.scheduler`, step by step, but takes equal steps all in one go: while only
decoding happens, and no sequence begins or fills a block, a step differs from the previous one only by the KV that it
reads. A test compares it with the scheduler, request by request.

At most one sequence is in the middle of its prompt: only the last running one can be partly prefilled, because none is
admitted while the budget is used up.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from kvatlas.errors import InvalidValue
from kvatlas_simulator.cache.allocation import AllocationRequest
from kvatlas_simulator.cache.block_hash import Namespace
from kvatlas_simulator.cache.kv_events import KVEvent
from kvatlas_simulator.cache.sequence_blocks import PrefixMatch
from kvatlas_simulator.engine.engine_cache import EngineCache
from kvatlas_simulator.engine.scheduler import SchedulerLimits
from kvatlas_simulator.engine.step_cost import StepCost
from kvatlas_simulator.hybrid_cache.cache import HybridCache
from kvatlas_simulator.lab.cache_layout import CACHE_BLOCK
from kvatlas_simulator.lab.requests import LabRequest, written, written_tokens


class EngineRequest:
    """A request in one engine. Times are virtual microseconds; `cached_tokens` None: the request has not been scheduled
    yet."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "change_at",
        "computed",
        "content",
        "finish_at",
        "finished_us",
        "first_token_us",
        "generated",
        "joined_at",
        "match",
        "order",
        "prefilling",
        "priority",
        "received_tokens",
        "request",
        "sequence_id",
    )

    def __init__(self, request: LabRequest, received_tokens: int = 0, priority: int = 0) -> None:
        """`received_tokens`: prompt tokens, in whole blocks, whose KV came from another engine. `priority`: requests with a
        lower one begin first and are preempted last; ties by arrival."""
        self.request = request
        self.received_tokens = received_tokens
        self.priority = priority
        self.sequence_id = str(request.number)
        self.content = written(request.contents)
        self.cached_tokens: int | None = None
        self.computed = 0
        """Real tokens; for a decoding sequence as of decode step `joined_at`."""
        self.generated = 0
        """Likewise, for a decoding sequence as of that step."""
        self.joined_at = 0
        self.change_at = self.finish_at = -1
        """The decode steps in which it next begins or fills a block, and in which it generates its last token; -1: not
        decoding."""
        self.prefilling = True
        self.match: PrefixMatch | None = None
        self.order = self.arrival = 0
        self.first_token_us = self.finished_us = 0.0


def _place(request: EngineRequest) -> tuple[int, int]:
    """Its place in an engine's queue."""
    return request.priority, request.arrival


@dataclass(frozen=True, slots=True)
class Advance:
    """The result of one or more steps, at their end."""

    ended_us: float
    first_tokens: Sequence[EngineRequest]
    finished: Sequence[EngineRequest]
    events: tuple[KVEvent, ...]


class VirtualEngine:
    """One engine. `cache` has blocks of two tokens (`lab.cache_layout`); `block_tokens` is their real size, at least 2.

    `ends_us`: when its current step ends (infinite: it is idle); call `advance` at that time.
    """

    def __init__(self, cache: EngineCache, block_tokens: int, limits: SchedulerLimits, cost: StepCost) -> None:
        if block_tokens < 2 or cache.block_size != CACHE_BLOCK:
            raise InvalidValue(
                f"blocks of {block_tokens} tokens over a cache of {cache.block_size}; expected 2 and 2 or more"
            )
        self.cache = cache
        self.block_tokens = block_tokens
        self.ends_us = math.inf
        self.up = True
        """True if routers may send requests to it."""
        self.prefilled_tokens = self.preemptions = self.busy_us = 0
        self.waiting: deque[EngineRequest] = deque()
        self.running: list[EngineRequest] = []
        """Running requests, the oldest first."""
        self._limits = limits
        self._cost = cost
        self._decoders = 0
        self._decode_step = 0
        """Decode steps so far."""
        self._kv_tokens = 0
        """Computed tokens of all decoding sequences."""
        self._changes: list[tuple[int, int, EngineRequest]] = []
        self._finishes: list[tuple[int, int, EngineRequest]] = []
        self._arrived = self._admitted = 0
        self._began_us = 0.0
        self._steps = 0
        """Number of steps in the current batch; 0: idle."""
        self._prefill: list[EngineRequest] = []
        self._prefill_tokens = self._swapped_in = 0
        self._prefill_pairs = 0.0

    # ---------------------------------------------------------------- what routers may see

    @property
    def capacity_tokens(self) -> int:
        """Slots of all blocks; a hybrid's groups share them."""
        return self.cache.num_blocks * self.block_tokens

    @property
    def request_slots(self) -> int:
        """Number of requests that may run at once."""
        return self._limits.max_num_seqs

    @property
    def kv_tokens(self) -> int:
        """Number of tokens in blocks that sequences hold."""
        return (self.cache.num_blocks - self.cache.available_blocks) * self.block_tokens

    @property
    def is_hybrid(self) -> bool:
        return isinstance(self.cache, HybridCache)

    @property
    def main_group(self) -> int:
        """The number of the group of full attention."""
        return self.cache.full_group if isinstance(self.cache, HybridCache) else 0

    @property
    def unprefilled(self) -> Sequence[EngineRequest]:
        """The requests whose prompts have not been computed, the next one first."""
        partial = [one for one in self.running[-1:] if one.prefilling]
        return [*partial, *self.waiting]

    def cached_tokens(self, content: Sequence[int], namespace: Namespace) -> int:
        """Number of a prompt's tokens (as `written`) that would be reused now."""
        return self._hit_tokens(self.cache.match(content, namespace))

    def uncached_tokens(self, sequence: EngineRequest) -> int:
        """Number of tokens left to compute for a prompt in `unprefilled`."""
        known = self._known_tokens(sequence)
        if sequence in self.running[-1:]:
            return known - sequence.computed
        content = sequence.content[: written_tokens(known, self.block_tokens)]
        return known - self.cached_tokens(content, sequence.request.identity.namespace)

    def blocks_once_computed(self, sequence: EngineRequest, blocks: int) -> int:
        """Number of a waiting request's first blocks that another request can reuse once they have been computed."""
        if not isinstance(self.cache, HybridCache):
            return blocks
        content = sequence.content[: written_tokens(self._known_tokens(sequence), self.block_tokens)]
        return self.cache.resumable_once_computed(content, sequence.request.identity.namespace, blocks)

    # ---------------------------------------------------------------- time

    def submit(self, request: EngineRequest, now_us: float) -> None:
        """Queue a request. Raises InvalidValue for one that can never run."""
        one = request.request
        longest = self.cache.capacity_tokens // CACHE_BLOCK * self.block_tokens
        if one.input_tokens + one.output_tokens > longest:
            shared = f", {self.capacity_tokens} in all groups" if self.is_hybrid else ""
            raise InvalidValue(
                f"request {one.number} of {one.input_tokens} + {one.output_tokens} tokens never fits a cache of "
                f"{longest} tokens{shared}; expected a larger --cache-tokens"
            )
        self._arrived += 1
        request.arrival = self._arrived
        insort(self.waiting, request, key=_place)
        if not self._steps:
            self._begin(now_us)
        elif self._steps > 1:
            self._cut(now_us)

    def advance(self) -> Advance:
        """End the current step or steps, and begin the next."""
        ended_us, steps = self.ends_us, self._steps
        self.busy_us += round(ended_us - self._began_us)
        if self._decoders:
            self._decode_step += steps
            self._kv_tokens += steps * self._decoders
        first_tokens: list[EngineRequest] = []
        finished = self._finish_decoders(ended_us)
        for sequence in self._prefill:
            if sequence.computed < self._known_tokens(sequence):
                continue
            if not sequence.generated:
                sequence.first_token_us = ended_us
                first_tokens.append(sequence)
            sequence.generated += 1
            sequence.prefilling = False
            if sequence.generated >= sequence.request.output_tokens:
                self._end(sequence, ended_us)
                finished.append(sequence)
            else:
                self._join_decoders(sequence)
        events = self.cache.take_events()
        self._begin(ended_us)
        return Advance(ended_us, first_tokens, finished, events)

    def stop(self) -> list[EngineRequest]:
        """End immediately: everything that the engine holds is lost. Returns its open requests; take the cache's events
        next."""
        lost = [*self.running, *self.waiting]
        for sequence in self.running:
            self.cache.free(sequence.sequence_id)
        self.running, self.waiting = [], deque()
        self._changes, self._finishes, self._prefill = [], [], []
        self._decoders = self._kv_tokens = self._steps = 0
        self.ends_us = math.inf
        self.cache.reset(include_cpu=True)
        return lost

    def _cut(self, now_us: float) -> None:
        """Finish only the step that is running now, because a request has arrived."""
        low, high = 1, self._steps
        while low < high:
            middle = (low + high) // 2
            if self._began_us + self._steps_us(middle) >= now_us:
                high = middle
            else:
                low = middle + 1
        self._steps = low
        self.ends_us = self._began_us + self._steps_us(low)

    def _steps_us(self, steps: int) -> float:
        """Duration of this many steps, each of which reads one more token of every decoding sequence."""
        count, cost = self._decoders, self._cost
        one = cost.step_us(
            prefill_tokens=self._prefill_tokens,
            decode_sequences=count,
            decode_kv_tokens=self._kv_tokens + count if count else 0,
            swapped_in=0,
            prefill_pairs=self._prefill_pairs,
        )
        swap_us = self._swapped_in * cost.swap_in_us_per_block
        return steps * one + swap_us + cost.decode_us_per_kv_token * count * (steps * (steps - 1) // 2)

    # ---------------------------------------------------------------- scheduling

    def _begin(self, now_us: float) -> None:
        """Choose what to compute next, and allocate its blocks."""
        self._prefill, self._prefill_tokens, self._swapped_in, self._prefill_pairs = [], 0, 0, 0.0
        if not self.running and not self.waiting:
            self._steps, self.ends_us = 0, math.inf
            return
        before = self.preemptions
        changed = self._continue_decoders()
        self._continue_prefill()
        if self.preemptions == before:
            self._admit_waiting()
        self._steps = 1
        if not (changed or self._prefill or self.preemptions > before):
            self._steps = self._equal_steps()
        self._began_us = now_us
        self.ends_us = now_us + self._steps_us(self._steps)

    def _equal_steps(self) -> int:
        """Number of steps until one in which a sequence changes its blocks, or after which a sequence finishes."""
        while self._changes[0][2].change_at != self._changes[0][0]:
            heappop(self._changes)
        while self._finishes[0][2].finish_at != self._finishes[0][0]:
            heappop(self._finishes)
        return max(1, min(self._changes[0][0] - 1, self._finishes[0][0]) - self._decode_step)

    def _continue_decoders(self) -> bool:
        """Write the tokens that change blocks in the next decode step. Returns True if there are any."""
        step, due = self._decode_step + 1, []
        while self._changes and self._changes[0][0] <= step:
            at, _, sequence = heappop(self._changes)
            if sequence.change_at == at:
                due.append(sequence)
        for sequence in due:  # in the order of admission
            if sequence.change_at != step:
                continue  # it was preempted in favor of another one
            computed = self._computed(sequence)
            if self._write(sequence, computed, computed + 1):
                self._plan_change(sequence, computed + 1, step)
        return bool(due)

    def _continue_prefill(self) -> None:
        sequence = self.running[-1] if self.running else None
        if sequence is None or not sequence.prefilling:
            return
        budget = self._limits.max_num_batched_tokens - self._decoders
        count = min(self._known_tokens(sequence) - sequence.computed, budget)
        if count > 0 and self._write(sequence, sequence.computed, sequence.computed + count):
            self._add_prefill(sequence, count)

    def _admit_waiting(self) -> None:
        budget = self._limits.max_num_batched_tokens - self._decoders - self._prefill_tokens
        while self.waiting and budget > 0 and len(self.running) < self._limits.max_num_seqs:
            sequence = self.waiting[0]
            known = self._known_tokens(sequence)
            content = sequence.content[: written_tokens(known, self.block_tokens)]
            namespace = sequence.request.identity.namespace
            match = self.cache.match(content, namespace, sequence.match)
            hit_tokens = self._hit_tokens(match)
            received = max(0, sequence.received_tokens - hit_tokens)
            count = received + min(known - hit_tokens - received, budget)
            chunk = written_tokens(hit_tokens + count, self.block_tokens) - match.hit_tokens
            allocation = AllocationRequest(sequence.sequence_id, content, namespace, first_chunk=chunk)
            most_step = written_tokens(self._limits.max_num_batched_tokens, self.block_tokens)
            if not self.cache.can_admit(allocation, match, most_step):
                sequence.match = match
                return
            self.waiting.popleft()
            sequence.match = None
            self._swapped_in += self.cache.swap_ins(match)
            self.cache.allocate(allocation, match, count_lookup=sequence.cached_tokens is None)
            if sequence.cached_tokens is None:
                sequence.cached_tokens = hit_tokens + received
            self._admitted += 1
            sequence.order, sequence.computed = self._admitted, hit_tokens
            self.running.append(sequence)
            self._add_prefill(sequence, count, received)
            budget -= count - received

    def _hit_tokens(self, match: PrefixMatch) -> int:
        return match.hit_tokens // CACHE_BLOCK * self.block_tokens

    def _add_prefill(self, sequence: EngineRequest, count: int, received: int = 0) -> None:
        """Add tokens to the step's prefill. `received` of them need not be computed."""
        new = count - received
        sequence.computed += count
        self._prefill.append(sequence)
        self._prefill_tokens += new
        self._prefill_pairs += new * (sequence.computed - new / 2)
        self.prefilled_tokens += new

    def _write(self, sequence: EngineRequest, computed: int, until: int) -> bool:
        """Write tokens to the cache; while there are too few blocks, preempt the running sequence with the last place in the
        queue. False if this one was preempted."""
        start, end = written_tokens(computed, self.block_tokens), written_tokens(until, self.block_tokens)
        while not self.cache.can_extend(sequence.sequence_id, end - start):
            victim = max(self.running, key=_place)
            self.running.remove(victim)
            self._preempt(victim)
            if victim is sequence:
                return False
        self.cache.extend(sequence.sequence_id, sequence.content[start:end])
        return True

    def _preempt(self, sequence: EngineRequest) -> None:
        """Release a sequence's blocks. It goes back to its place in the queue, and recomputes what the cache has lost by
        then."""
        self._leave_decoders(sequence)
        self.cache.free(sequence.sequence_id)
        sequence.computed = sequence.received_tokens = 0
        sequence.prefilling = True
        self.preemptions += 1
        insort(self.waiting, sequence, key=_place)

    # ---------------------------------------------------------------- decoding sequences

    def _known_tokens(self, sequence: EngineRequest) -> int:
        """Number of known tokens in a sequence's prompt and answer. Not for decoding sequences."""
        return sequence.request.input_tokens + sequence.generated

    def _computed(self, sequence: EngineRequest) -> int:
        """Number of tokens of a decoding sequence that have been computed by now."""
        return sequence.computed + self._decode_step - sequence.joined_at

    def _join_decoders(self, sequence: EngineRequest) -> None:
        self._decoders += 1
        self._kv_tokens += sequence.computed
        sequence.joined_at = self._decode_step
        sequence.finish_at = self._decode_step + sequence.request.output_tokens - sequence.generated
        heappush(self._finishes, (sequence.finish_at, sequence.order, sequence))
        self._plan_change(sequence, sequence.computed, self._decode_step)

    def _plan_change(self, sequence: EngineRequest, computed: int, step: int) -> None:
        """Plan the next change of its blocks, with `computed` tokens after this decode step."""
        rest = computed % self.block_tokens
        sequence.change_at = step + (self.block_tokens - rest if rest else 1)
        heappush(self._changes, (sequence.change_at, sequence.order, sequence))

    def _leave_decoders(self, sequence: EngineRequest) -> None:
        if not sequence.prefilling:
            done = self._decode_step - sequence.joined_at
            sequence.computed += done
            sequence.generated += done
            self._decoders -= 1
            self._kv_tokens -= sequence.computed
            sequence.change_at = sequence.finish_at = -1

    def _finish_decoders(self, now_us: float) -> list[EngineRequest]:
        finished = []
        while self._finishes and self._finishes[0][0] <= self._decode_step:
            at, _, sequence = heappop(self._finishes)
            if sequence.finish_at == at:
                self._leave_decoders(sequence)
                self._end(sequence, now_us)
                finished.append(sequence)
        return finished

    def _end(self, sequence: EngineRequest, now_us: float) -> None:
        self.running.remove(sequence)
        self.cache.free(sequence.sequence_id)
        sequence.finished_us = now_us
