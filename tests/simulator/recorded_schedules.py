"""Schedules of vLLM's own scheduler (`tests/oracle/record_schedules.py`), and the simulated engines' for the same requests."""

import gzip
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kvatlas.blocks.hashing import extend_chain
from kvatlas_simulator.cache.block_hash import SeededBlockHasher
from kvatlas_simulator.cache.kv_cache import KVCache
from kvatlas_simulator.engine.engine_cache import EngineCache
from kvatlas_simulator.engine.generation_request import GenerationRequest
from kvatlas_simulator.engine.scheduler import EngineSequence, Scheduler, SchedulerLimits
from kvatlas_simulator.engine.step_cost import StepCost
from kvatlas_simulator.hybrid_cache.cache import HybridCache
from kvatlas_simulator.hybrid_cache.groups import parse_groups
from kvatlas_simulator.lab.cache_layout import CacheLayout
from kvatlas_simulator.lab.engine import EngineRequest, VirtualEngine
from kvatlas_simulator.lab.requests import LabRequest

PIECE = 10_000
ANSWERS = 100_000
ONE_STEP = StepCost(0.0, 0.0, 0.0, 0.0, 0.0, overhead_us=1.0)
"""Each step takes one microsecond, so that times are numbers of steps."""


@dataclass(frozen=True)
class RecordedRequest:
    """`at`: the step before which it arrives. `hit`: its tokens that were cached when it was first scheduled."""

    number: int
    at: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    priority: int
    hit: int


@dataclass(frozen=True)
class Step:
    """`computed`: each scheduled request and how many of its tokens are computed by then, in the scheduler's order."""

    computed: list[tuple[int, int]]
    preempted: list[int]


class Service(NamedTuple):
    """How one request was served: its cached tokens, and the steps that gave its first and its last token."""

    hit: int
    first: int
    last: int


@dataclass(frozen=True)
class Schedule:
    """What vLLM's scheduler did."""

    groups: tuple[str, ...]
    blocks: int
    """Blocks that it can use."""
    block_size: int
    limits: SchedulerLimits
    requests: list[RecordedRequest]
    steps: list[Step]

    @classmethod
    def read(cls, path: Path) -> "Schedule":
        recorded: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        config = recorded["config"]
        requests = [
            RecordedRequest(
                number,
                one["at"],
                tuple(piece * PIECE + i for piece, length in one["prompt"] for i in range(length)),
                tuple((ANSWERS + number) * PIECE + i for i in range(one["answer"])),
                one["priority"],
                one["hit"],
            )
            for number, one in enumerate(recorded["requests"])
        ]
        steps = [Step([(who, done) for who, done in one["computed"]], one["preempted"]) for one in recorded["steps"]]
        limits = SchedulerLimits(config["sequences"], config["budget"], queue_limit=len(requests))
        unused = 1  # vLLM's block 0 stands for none
        size = recorded["block_size"]
        return cls(tuple(config["groups"]), config["pool"] - unused, size, limits, requests, steps)

    @cached_property
    def services(self) -> list[Service]:
        """By request."""
        first, last = dict[int, int](), dict[int, int]()
        for number, step in enumerate(self.steps):
            for who, done in step.computed:
                if done >= len(self.requests[who].prompt):
                    first.setdefault(who, number)
                    last[who] = number
        return [Service(one.hit, first[one.number], last[one.number]) for one in self.requests]

    @property
    def preemptions(self) -> int:
        return sum(len(step.preempted) for step in self.steps)


def schedule_stepwise(recorded: Schedule) -> tuple[list[Step], list[int]]:
    """The steps of the simulator's scheduler for these requests, and each request's cached tokens."""
    scheduler = Scheduler(_cache(recorded), recorded.limits)
    sequences = [
        EngineSequence(GenerationRequest(str(one.number), one.prompt, len(one.answer)), 0, one.answer)
        for one in recorded.requests
    ]
    due, steps = list(sequences), list[Step]()
    while due or scheduler.running or scheduler.waiting:
        while due and _request(recorded, due[0]).at <= len(steps):
            scheduler.enqueue(due.pop(0))
        if not scheduler.running and not scheduler.waiting:
            break  # it ended earlier than vLLM's
        before = {one.request.request_id for one in sequences if one.computed}
        batch = scheduler.schedule()
        computed = [(int(one.request.request_id), one.computed) for one in batch.sequences]
        after = {one.request.request_id for one in sequences if one.computed}
        steps.append(Step(computed, sorted(map(int, before - after))))
        for sequence in batch.sequences:
            if sequence.remaining:
                continue
            sequence.prefilling = False
            sequence.tokens.append(sequence.answer[sequence.generated])
            if sequence.generated == sequence.request.max_tokens:
                sequence.computed = 0
                scheduler.end(sequence)
    return steps, [one.cached_tokens or 0 for one in sequences]


def serve_in_virtual_time(recorded: Schedule) -> tuple[list[Service], int]:
    """How the lab's engine serves these requests, and its preemptions."""
    layout = CacheLayout(parse_groups(recorded.groups)).scaled(recorded.block_size)
    engine = VirtualEngine(layout.build(recorded.blocks, 0, 1), recorded.block_size, recorded.limits, ONE_STEP)
    served: dict[int, Service] = {}

    def advance() -> None:
        for one in engine.advance().finished:
            # times are the ends of steps
            steps = round(one.first_token_us) - 1, round(one.finished_us) - 1
            served[one.request.number] = Service(one.cached_tokens or 0, *steps)

    ids: dict[int, int] = {}
    for one in recorded.requests:
        while engine.ends_us < one.at:
            advance()
        during = one.at - 0.5 if engine.ends_us < math.inf else float(one.at)
        engine.submit(EngineRequest(_lab_request(one, recorded.block_size, ids), priority=one.priority), during)
    while engine.ends_us < math.inf:
        advance()
    return [served[one.number] for one in recorded.requests], engine.preemptions


def _cache(recorded: Schedule) -> EngineCache:
    groups, hasher = parse_groups(recorded.groups), SeededBlockHasher(1)
    if len(groups) == 1:
        return KVCache(num_blocks=recorded.blocks, block_size=recorded.block_size, hasher=hasher)
    return HybridCache(groups, num_blocks=recorded.blocks, block_size=recorded.block_size, hasher=hasher)


def _request(recorded: Schedule, sequence: EngineSequence) -> RecordedRequest:
    return recorded.requests[int(sequence.request.request_id)]


def _lab_request(one: RecordedRequest, block_size: int, ids: dict[int, int]) -> LabRequest:
    tokens = [*one.prompt, *one.answer]
    chain = extend_chain(tokens, block_size)
    contents = [
        ids.setdefault(int.from_bytes(chain[at : at + 8], "little"), len(ids)) for at in range(0, len(chain), 8)
    ]
    if len(tokens) % block_size:
        contents.append(1 << 31 | one.number)
    return LabRequest(one.number, float(one.at), len(one.prompt), len(one.answer), tuple(contents), one.number)
