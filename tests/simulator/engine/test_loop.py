"""The loop around the scheduler: waking, giving up, publishing."""

import anyio
import pytest

from simulator.cache.block_changes import BlockChange
from simulator.cache.block_hash import SeededBlockHasher
from simulator.cache.kv_cache import KVCache
from simulator.engine.generation import GenerationRequest
from simulator.engine.loop import EngineLoop
from simulator.engine.scheduler import EngineCore
from tests.eventually import until
from tests.simulator.cache.event_fold import EventFold

pytestmark = pytest.mark.anyio


class Kept:
    """A sink that folds what it is given."""

    def __init__(self) -> None:
        self.batches: list[tuple[BlockChange, ...]] = []

    async def publish(self, changes: tuple[BlockChange, ...]) -> None:
        assert changes
        self.batches.append(changes)


def a_loop(sink: Kept, speed_up: float = 1e4) -> EngineLoop:
    cache = KVCache(num_blocks=64, block_size=4, hasher=SeededBlockHasher(1))
    return EngineLoop(EngineCore(cache), sink, speed_up=speed_up)


async def test_a_request_given_up_before_the_engine_wakes_does_no_harm() -> None:
    sink = Kept()
    engine = a_loop(sink)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        await anyio.wait_all_tasks_blocked()
        with engine.generate(GenerationRequest("gone", (1, 2, 3), 5)):
            pass
        await anyio.wait_all_tasks_blocked()
        with engine.generate(GenerationRequest("stays", (1, 2, 3, 4, 5), 2)) as tokens:
            assert [(await tokens.receive()).finish_reason for _ in range(2)] == [None, "length"]
        tasks.cancel_scope.cancel()
    assert engine.core.cache.available_blocks == 64


async def test_the_answer_comes_after_the_events_of_its_step() -> None:
    sink = Kept()
    engine = a_loop(sink)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        with engine.generate(GenerationRequest("s", tuple(range(9)), 1)) as tokens:
            await tokens.receive()
            assert len(sink.batches) == 1
        tasks.cancel_scope.cancel()
    fold = EventFold(4)
    fold.apply(sink.batches[0])
    assert len(fold.copies) == 2


async def test_an_engine_that_stops_ends_open_answers() -> None:
    engine = a_loop(Kept(), speed_up=0.001)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(engine.run)
        with engine.generate(GenerationRequest("s", (1, 2), 1)) as tokens:
            await until(lambda: engine.load.running, what="the request to run")
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True), pytest.raises(anyio.EndOfStream):
                await tokens.receive()
