"""Simulated engines of different speeds behind one router, in simulated time."""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

from kvatlas.fleet.records import FleetRecord, ForwardPassMetrics, WorkerState
from kvatlas_simulator.cache.block_hash import SeededBlockHasher
from kvatlas_simulator.cache.kv_cache import KVCache
from kvatlas_simulator.engine.core import EngineCore
from kvatlas_simulator.engine.generation_request import GeneratedToken, GenerationRequest
from kvatlas_simulator.engine.scheduler import SchedulerLimits
from kvatlas_simulator.engine.step_cost import StepCost
from router_client import AnswerClock, Choice, Prompt, RouterClient, StaticFleet, Timings, Usage
from tests.router_client.pools import SCOPE, worker

SAMPLE_US = 1_000_000
BLOCK_SIZE = 16


@dataclass(slots=True)
class _Asked:
    choice: Choice
    clock: AnswerClock
    prompt_tokens: int
    output: int = 0


@dataclass(slots=True)
class SimulatedFleet:
    """`costs`: each worker's true speed. `noise`: relative noise of measurements; `broken`: the share of measurements that are
    nonsense. `answers`: the range of their lengths in tokens; `tokens_a_part`: tokens that speculative decoding makes in a
    step; `usage_late_us`: time from the last token to the usage. Engines are sampled every second, as by sidecars."""

    costs: Mapping[str, StepCost]
    noise: float = 0.05
    broken: float = 0.0
    answers: tuple[int, int] = (8, 200)
    tokens_a_part: int = 1
    usage_late_us: float = 0.0
    seed: int = 1
    now_us: float = 1e15
    fleet: StaticFleet = field(init=False)
    served: dict[str, int] = field(init=False)
    """Requests by worker."""
    _random: Random = field(init=False)
    _engines: dict[str, EngineCore] = field(init=False)
    _asked: dict[str, _Asked] = field(init=False, default_factory=dict)
    _ended: list[tuple[float, str, Usage]] = field(init=False, default_factory=list)
    """Answers whose usage has not arrived, the next one first."""

    def __post_init__(self) -> None:
        self._random = Random(self.seed)
        self._engines = {
            id: EngineCore(
                KVCache(num_blocks=65_536, block_size=BLOCK_SIZE, hasher=SeededBlockHasher(1)),
                limits=SchedulerLimits(max_num_seqs=256),
                cost=cost,
            )
            for id, cost in self.costs.items()
        }
        self.fleet, self.served = StaticFleet({}), dict.fromkeys(self.costs, 0)
        self._sample()

    def clock_us(self) -> int:
        """The simulated time."""
        return int(self.now_us)

    async def serve(self, router: RouterClient, requests: int, a_second: float) -> None:
        """Serve requests to their end, each with a different prompt of 128 to 4,096 tokens."""
        due_us, coming = self.now_us, requests
        steps: list[tuple[float, str, object]] = []
        running: set[str] = set()
        next_sample = self.now_us + SAMPLE_US
        while coming or steps or self._ended:
            ends_us, usage_us = (one[0][0] if one else math.inf for one in (steps, self._ended))
            self.now_us = min(ends_us, usage_us, due_us if coming else math.inf, next_sample)
            if self.now_us == usage_us:
                await self._done(*self._ended.pop(0)[1:])
            elif self.now_us == next_sample:
                next_sample += SAMPLE_US
                self._sample()
            elif self.now_us == ends_us:
                _, id, step = heapq.heappop(steps)
                running.discard(id)
                for token in self._engines[id].end_step(step).tokens:  # type: ignore[arg-type]
                    await self._token(token)
            else:
                await self._ask(router, requests - coming)
                coming -= 1
                due_us = self.now_us + self._random.expovariate(a_second) * 1e6
            for id in self._engines.keys() - running:
                if self._engines[id].has_work:
                    step = self._engines[id].begin_step(self.now_us)
                    running.add(id)
                    heapq.heappush(steps, (step.ended_us, id, step))

    async def _ask(self, router: RouterClient, number: int) -> None:
        tokens = [self._random.randrange(100_000) for _ in range(round(2 ** self._random.uniform(7, 12)))]
        output = self._random.randint(*self.answers)
        choice = await router.reserve(Prompt.of_tokens(SCOPE, tokens, output_tokens=output))
        id = f"{self.seed}-{number}-{self.now_us}"
        clock = AnswerClock(lambda: int(self.now_us * 1_000))
        self._asked[id] = _Asked(choice, clock, len(tokens))
        self.served[choice.worker_id] += 1
        steps = -(-output // self.tokens_a_part)
        self._engines[choice.worker_id].submit(GenerationRequest(id, tuple(tokens), steps))

    async def _token(self, token: GeneratedToken) -> None:
        asked = self._asked[token.request_id]
        asked.clock.part()
        if not asked.output:
            await asked.choice.first_token()
        asked.output += self.tokens_a_part
        if token.finish_reason is not None:
            usage = Usage(asked.prompt_tokens, asked.output, token.cached_tokens)
            self._ended.append((self.now_us + self.usage_late_us, token.request_id, usage))

    async def _done(self, id: str, usage: Usage) -> None:
        asked = self._asked.pop(id)
        await asked.choice.done(usage=usage, timings=self._measured(asked.clock.timings(asked.output)))

    def _measured(self, true: Timings) -> Timings:
        times = self._random.choice([1e-4, 0.01, 50, 1e4]) if self._random.random() < self.broken else 1.0
        first, later = (times * self._random.lognormvariate(0, self.noise) for _ in range(2))
        return Timings(true.ttft_us and true.ttft_us * first, true.tpot_us and true.tpot_us * later)

    def _sample(self) -> None:
        self.fleet.records = {id: self._record(id, engine) for id, engine in self._engines.items()}

    def _record(self, id: str, engine: EngineCore) -> FleetRecord:
        load = engine.load
        forward = ForwardPassMetrics(
            requests_waiting=load.waiting,
            active_request_slots=load.running,
            active_kv_blocks=round(engine.cache.utilisation * engine.cache.num_blocks),
            total_kv_blocks=engine.cache.num_blocks,
        )
        state = WorkerState(id=id, running_decodes=load.running, forward_pass=forward, sampled_us=self.clock_us())
        return worker(id, block_size=BLOCK_SIZE).model_copy(update={"load": state})
