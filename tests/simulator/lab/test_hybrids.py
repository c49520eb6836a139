"""Hybrid fleets: with marks, kvatlas predicts exactly what engines will reuse, and without marks it does not; the oracle also
knows it."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from kvatlas.errors import InvalidValue, SettingsError
from kvatlas.index.memory.index import MemoryIndex
from kvatlas_simulator.engine.step_cost import StepCost
from kvatlas_simulator.hybrid_cache.groups import parse_groups
from kvatlas_simulator.lab.cache_layout import CacheLayout
from kvatlas_simulator.lab.engine import EngineRequest, VirtualEngine
from kvatlas_simulator.lab.event_path import EventPath
from kvatlas_simulator.lab.generated_requests import BLOCK_TOKENS, generate
from kvatlas_simulator.lab.policies.atlas import Atlas, AtlasSettings
from kvatlas_simulator.lab.policies.engine_names import worker_name
from kvatlas_simulator.lab.replay import FleetSettings, build_engines, replay
from kvatlas_simulator.lab.requests import LabRequest, Workload
from kvatlas_simulator.lab.settings import ReplaySettings
from kvatlas_simulator.lab.summary import Figures, Objective

MODELS = [("full", "swa:500"), ("mamba", "full"), ("full", "chunked:512"), ("full", "swa:200", "mamba", "chunked:256")]


def fleet_of(groups: Sequence[str], interval: int = 0) -> FleetSettings:
    """Two workers with room for a few agents."""
    return FleetSettings(2, 30_000 * len(groups), layout=CacheLayout(parse_groups(groups), interval))


class Fleet:
    """Engines whose events are in the index at once, and the routers of one kvatlas policy."""

    def __init__(self, settings: FleetSettings, *, marks: bool) -> None:
        self.engines = build_engines(settings, BLOCK_TOKENS)
        index, layout = MemoryIndex(), settings.layout.scaled(BLOCK_TOKENS)
        self._paths = [
            EventPath(
                worker_name(i),
                index,
                lambda when_us, action: action(),
                random.Random(i),
                layout,
                delay_us=0.0,
                loss=0.0,
            )
            for i in range(settings.workers)
        ]
        self._atlas = Atlas(self.engines, index, StepCost(), AtlasSettings(marks=marks))
        self._now_us = 1e6

    def serve(self, request: LabRequest) -> tuple[int, int]:
        """Serve a request to its end. Returns the predicted cached tokens, and those that its engine found."""
        number = self._atlas.choose(request, self._now_us)
        predicted = self._atlas.predicted_tokens(request.number)
        engine, sequence = self.engines[number], EngineRequest(request)
        engine.submit(sequence, self._now_us)
        while engine.ends_us < math.inf:
            done = engine.advance()
            self._now_us = done.ended_us
            if done.events:
                self._paths[number].publish(done.events, done.ended_us)
            for one in done.first_tokens:
                self._atlas.record_first_token(one, number)
        self._atlas.record_finish(sequence, number)
        self._now_us += 1e6
        self._atlas.record_loads(self.engines, self._now_us)
        return predicted, sequence.cached_tokens or 0


def predictions(settings: FleetSettings, *, marks: bool, requests: int = 100) -> list[tuple[int, int]]:
    """(predicted, found) tokens of agents' requests, one at a time, on engines that evict."""
    fleet = Fleet(settings, marks=marks)
    found = [fleet.serve(request) for request in generate("agents", 2, requests).requests]
    assert any(engine.cache.stats().evictions for engine in fleet.engines)
    return found


@pytest.mark.parametrize("groups", MODELS, ids=",".join)
@pytest.mark.parametrize("interval", [0, 4 * BLOCK_TOKENS])
def test_with_marks_the_cached_tokens_of_every_request_are_predicted_exactly(
    groups: tuple[str, ...], interval: int
) -> None:
    found = predictions(fleet_of(groups, interval=interval), marks=True)
    assert all(predicted == cached for predicted, cached in found)
    assert sum(cached > 0 for _, cached in found) > 50


@pytest.mark.parametrize("groups", MODELS, ids=",".join)
def test_without_marks_they_are_not(groups: tuple[str, ...]) -> None:
    found = predictions(fleet_of(groups), marks=False, requests=160)
    assert sum(predicted > cached for predicted, cached in found) >= 5
    assert all(predicted >= cached for predicted, cached in found)


def test_engines_of_one_group_have_no_marks_to_lose() -> None:
    full = fleet_of(["full"])
    assert predictions(full, marks=False) == predictions(full, marks=True)


def hit_rate(policy: str, settings: FleetSettings, workload: Workload) -> float:
    return Figures.of(replay(workload, policy, settings, 1, speed=4.0), Objective()).hit_rate


def test_a_hybrid_reuses_less_than_full_attention_in_as_many_blocks() -> None:
    workload = generate("agents", 2, 150)
    rates = [hit_rate("oracle", fleet_of(groups), workload) for groups in (["full"], ["full", "mamba"])]
    assert 0 < rates[1] < rates[0]


def waiting(settings: FleetSettings, request: LabRequest) -> tuple[VirtualEngine, EngineRequest]:
    """An engine, with a request that it has not begun."""
    engine = build_engines(settings, BLOCK_TOKENS)[0]
    return engine, EngineRequest(request)


def test_what_a_hybrid_will_hold_is_resumable_where_its_prompt_ends() -> None:
    request = LabRequest(0, 0.0, 10 * BLOCK_TOKENS + 5, 1, tuple(range(11)), 0)
    engine, sequence = waiting(fleet_of(["full", "mamba"]), request)
    assert engine.blocks_once_computed(sequence, 10) == 10
    assert engine.blocks_once_computed(sequence, 9) == 0
    engine, sequence = waiting(fleet_of(["full", "mamba"], interval=4 * BLOCK_TOKENS), request)
    assert engine.blocks_once_computed(sequence, 9) == 8
    engine, sequence = waiting(fleet_of(["full"]), request)
    assert engine.blocks_once_computed(sequence, 9) == 9


def test_what_was_foretold_is_what_is_reused() -> None:
    """A prompt's `blocks_once_computed`, compared with the cache after it was computed."""
    chance = random.Random(3)
    for groups in MODELS:
        engine = build_engines(replace(fleet_of(groups), cache_tokens=1_000_000), BLOCK_TOKENS)[0]
        for number in range(40):
            shared = chance.randint(1, 30)
            contents = tuple(n if n < shared else 1_000 * (number + 1) + n for n in range(32))
            request = LabRequest(number, 0.0, 31 * BLOCK_TOKENS + 1, 1, contents, number)
            sequence = EngineRequest(request)
            cut = chance.randint(1, 31)
            foretold = engine.blocks_once_computed(sequence, cut)
            engine.submit(sequence, 0.0)
            while engine.ends_us < math.inf:
                engine.advance()
            prompt = [*sequence.content[: 2 * cut], 1 << 30]
            assert engine.cached_tokens(prompt, request.identity.namespace) == foretold * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"groups": "full,swa"}, "--groups is 'full,swa'; expected full, swa:WINDOW, chunked:SIZE or mamba as a group"),
        (
            {"groups": "full,mamba", "cpu_tokens": 1_000},
            "--groups is 'full,mamba'; expected one group with --cpu-tokens",
        ),
        ({"groups": "full,mamba", "curve": True}, "--curve is True; expected one group with --curve"),
    ],
)
def test_groups_that_no_engine_has_are_one_clear_error(flags: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError) as error:
        ReplaySettings.load(**flags)
    assert message in str(error.value)


@pytest.mark.parametrize("text", ["full,chunked:100", "full,chunked:6400"])
def test_chunks_are_whole_blocks_of_the_trace(text: str) -> None:
    layout = CacheLayout(parse_groups(text.split(",")))
    assert str(layout) == text
    if layout.chunk_tokens % BLOCK_TOKENS:
        with pytest.raises(InvalidValue, match="chunks of 100 tokens; expected a multiple of the trace's blocks, 64"):
            layout.scaled(BLOCK_TOKENS)
    else:
        assert layout.scaled(BLOCK_TOKENS).chunk_tokens == 200
