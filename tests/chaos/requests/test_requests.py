"""Requests through routers while engines fail in every way that engines do, and while routers are replaced."""

from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial

import anyio
import pytest

from kvatlas.store.connection import Store, open_store
from kvatlas_router.ejection.pool_ejections import MOST_EJECT_S
from tests.chaos.requests.request_faults import AT_ONCE, BREAKS, DRIBBLED, FAULTS, drive, run
from tests.chaos.requests.rolled_routers import RouterTask, roll
from tests.router.progress.quick_bounds import shorten_bounds
from tests.router.proxy.engines import running_fleet, running_proxy
from tests.router.proxy.faulty_engine import faulty_engine, well
from tests.router.proxy.raw_engine import HEAD, chunk, raw_engine, silent_engine

pytestmark = pytest.mark.anyio

REQUESTS = 72
SAME = {"429", "slow"}
"""To a router, these are the same as `500` and `busy`."""


@pytest.fixture
async def store(fresh_valkey: str) -> AsyncIterator[Store]:
    store = await open_store(fresh_valkey, wait=False)
    yield store
    await store.close()


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in SAME])
async def test_no_request_is_lost_to_one_bad_engine_of_four(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    # the bad worker is ejected once: how often it is tried again depends on how long the requests take
    monkeypatch.setattr("kvatlas_router.ejection.pool_ejections.EJECT_S", MOST_EJECT_S)
    shorten_bounds(monkeypatch, least_s=0.7, unknown_s=60)  # "busy" is not a fault
    figures = await run(store, valkey_url, fault, REQUESTS, continue_answers="all" if fault in BREAKS else "off")
    assert figures.lost == [] and figures.answered == REQUESTS
    if fault not in {
        "lies",
        "busy",
        "hangs",
        *DRIBBLED,
    }:  # their answers are good; a hang takes time to be detected
        assert figures.share_after <= 0.1


@pytest.mark.parametrize("first", [None, HEAD + chunk(b'data: {"choices": []}\n\n')[:-4]])
async def test_no_request_is_lost_to_an_engine_that_is_away_or_hangs(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch, first: bytes | None
) -> None:
    shorten_bounds(monkeypatch)
    async with AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(running_fleet(store, {}))
        rude = await stack.enter_async_context(raw_engine(b"") if first is None else silent_engine(first))
        await fleet.report("w0", rude.url)
        for number in range(1, 4):
            await fleet.report(f"w{number}", (await stack.enter_async_context(faulty_engine(well))).url)
        client = await stack.enter_async_context(running_proxy(valkey_url, learn=False, access_log=False))
        figures = await drive([client], Counter(), "w0", streamed=True, requests=REQUESTS)
        assert figures.lost == [] and figures.answered + figures.broken == REQUESTS
        assert figures.broken <= (AT_ONCE * 3 if first else 0)


async def test_no_stream_is_lost_while_three_routers_are_replaced_one_by_one(store: Store, valkey_url: str) -> None:
    """`python -m tests.chaos requests` does it with processes and 200 streams."""
    async with anyio.create_task_group() as tasks:
        rolled = await roll(store, partial(RouterTask.start, valkey_url, tasks), streams=40, gap_s=0.15)
    assert rolled.lost == []
    assert rolled.replaced == 3 and rolled.across >= 10  # streams that were running when their router was asked to stop
    assert rolled.complete >= 40
