"""Upper bounds are multiplied by the share that answers had; nothing else changes."""

import pytest

from kvatlas.blocks.hashing import extend_chain
from kvatlas.fleet.records import EngineEndpoint, EngineKind, EngineState, FleetRecord, Liveness
from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas_router.tokens import Usage
from router_client import Prompt, RouterClient
from router_client.learning.bound_shares import LEAST_ANSWERS
from router_client.settings import RouterSettings
from tests.kvatlas.index.message_source import MessageSource, apply_messages
from tests.router_client.pools import CountingFleet

pytestmark = pytest.mark.anyio

SCOPE = Scope("model", "model")
TOKENS = list(range(401))
CHAIN = extend_chain(TOKENS, 4)
WHY = "the engine reports full attention only"


def record(id: str, upper_bound: str = "") -> FleetRecord:
    endpoint = EngineEndpoint(
        id=id, kind=EngineKind.SGLANG, model_id="model", tokenizer_id="model", block_size=4, upper_bound=upper_bound
    )
    return FleetRecord(endpoint=endpoint, state=EngineState.UP, liveness=Liveness.ALIVE)


async def usable_after(answers: int, cached_tokens: int | None, upper_bound: str = WHY) -> tuple[int, str]:
    """Usable tokens of 400 resident ones after this many answers, and their explanation."""
    index, source = MemoryIndex(), MessageSource("w")
    await apply_messages(index, source.begin(1), source.store(SCOPE, CHAIN))
    fleet = CountingFleet({"w": record("w", upper_bound)})
    async with RouterClient(index, fleet, RouterSettings(fleet_max_age_ms=0)) as router:
        prompt = Prompt.of_tokens(SCOPE, TOKENS)
        for _ in range(answers):
            async with router.route(prompt) as choice:
                await choice.done(usage=Usage(401, 10, cached_tokens))
        [ranked] = await router.rank(prompt)
        [seen] = await router.overlap(prompt)
        assert (ranked.usable_tokens, ranked.upper_bound) == (seen.usable_tokens, seen.upper_bound)
        assert seen.resident_tokens == 400
        return seen.usable_tokens, seen.upper_bound


async def test_enough_answers_correct_an_upper_bound_visibly() -> None:
    assert await usable_after(LEAST_ANSWERS - 1, 100) == (400, WHY)
    assert await usable_after(LEAST_ANSWERS, 100) == (100, f"{WHY}; answers had 25% of it")
    assert await usable_after(LEAST_ANSWERS, 400) == (400, WHY)


async def test_answers_that_tell_nothing_and_workers_that_are_exact_teach_nothing() -> None:
    assert await usable_after(LEAST_ANSWERS, None) == (400, WHY)
    assert await usable_after(LEAST_ANSWERS, 100, upper_bound="") == (400, "")
