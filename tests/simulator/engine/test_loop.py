"""The engine loop: wake-ups, aborted requests, the order of events and answers."""

import anyio
import pytest

from kvatlas_simulator.cache.block_hash import SeededBlockHasher
from kvatlas_simulator.cache.kv_cache import KVCache
from kvatlas_simulator.cache.kv_events import KVEvent
from kvatlas_simulator.engine.core import EngineCore
from kvatlas_simulator.engine.generation_request import GenerationRequest
from kvatlas_simulator.engine.loop import EngineLoop
from tests.eventually import until
from tests.simulator.cache.event_fold import EventFold

pytestmark = pytest.mark.anyio


class RecordingSink:
    """Keeps every batch."""

    def __init__(self) -> None:
        self.batches: list[tuple[KVEvent, ...]] = []

    async def publish(self, events: tuple[KVEvent, ...]) -> None:
        assert events
        self.batches.append(events)


def make_loop(sink: RecordingSink, speed_up: float = 1e4) -> EngineLoop:
    cache = KVCache(num_blocks=64, block_size=4, hasher=SeededBlockHasher(1))
    return EngineLoop(EngineCore(cache), sink, speed_up=speed_up)


async def test_a_request_can_be_aborted_before_the_engine_wakes() -> None:
    sink = RecordingSink()
    engine = make_loop(sink)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        await anyio.wait_all_tasks_blocked()
        with engine.generate(GenerationRequest("aborted", (1, 2, 3), 5)):
            pass
        await anyio.wait_all_tasks_blocked()
        with engine.generate(GenerationRequest("stays", (1, 2, 3, 4, 5), 2)) as tokens:
            assert [(await tokens.receive()).finish_reason for _ in range(2)] == [None, "length"]
        tasks.cancel_scope.cancel()
    assert engine.core.cache.available_blocks == 64


async def test_a_token_comes_after_the_events_of_its_step() -> None:
    sink = RecordingSink()
    engine = make_loop(sink)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        with engine.generate(GenerationRequest("s", tuple(range(9)), 1)) as tokens:
            await tokens.receive()
            assert len(sink.batches) == 1
        tasks.cancel_scope.cancel()
    fold = EventFold(4)
    fold.apply(sink.batches[0])
    assert len(fold.copies) == 2


async def test_a_stopping_engine_ends_open_answers() -> None:
    engine = make_loop(RecordingSink(), speed_up=0.001)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        with engine.generate(GenerationRequest("s", (1, 2), 1)) as tokens:
            await until(lambda: engine.load.running, what="the request to run")
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True), pytest.raises(anyio.EndOfStream):
                await tokens.receive()


async def test_a_hung_engine_takes_requests_and_computes_nothing_until_it_goes_on() -> None:
    sink = RecordingSink()
    engine = make_loop(sink)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        engine.hang()
        with engine.generate(GenerationRequest("left", (1, 2, 3), 5)):
            await anyio.wait_all_tasks_blocked()
        before = engine.load
        with engine.generate(GenerationRequest("waits", (1, 2, 3, 4, 5), 1)) as tokens:
            await anyio.wait_all_tasks_blocked()
            assert sink.batches == [] and tokens.statistics().current_buffer_used == 0
            assert engine.load.generation_tokens_total == before.generation_tokens_total
            engine.resume()
            assert (await tokens.receive()).finish_reason == "length"
        tasks.cancel_scope.cancel()
    assert engine.core.cache.available_blocks == 64
