"""The router client: picking, refusing, explaining, and opening a store."""

from dataclasses import replace
from typing import Any

import anyio
import pytest

from kvatlas.blocks.hashing import extend_chain, unpack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.cost import QuillcacheProfile
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.fleet.records import EngineState, Liveness, Role
from kvatlas.fleet_store.fleet_store import FLEET_LIBRARY, FleetStore
from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.protocol import ResidencyIndex
from kvatlas.index.redis.index import open_redis_index
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.reservations.redis_calls import POOL_LIBRARY
from kvatlas.store.connection import Store, connected_store
from kvatlas.store.function_library import mark_key
from router_client import (
    Fallbacks,
    InvalidValue,
    LayoutMismatch,
    NotSupported,
    NoWorkers,
    Prompt,
    RequestHints,
    RouterClient,
    RouterSettings,
    StaticFleet,
    Unreachable,
)
from router_client.chain_cache import PIECE_BLOCKS, ChainCache
from tests.eventually import until
from tests.router_client.pools import FETCH_BY, PEER, SCOPE, CountingFleet, CountingIndex, hold, pool, worker

pytestmark = pytest.mark.anyio

TOKENS = list(range(1_000))
PROMPT = Prompt.of_tokens(SCOPE, TOKENS)


async def test_a_request_goes_to_the_worker_that_holds_its_prompt(index: ResidencyIndex) -> None:
    workers = [worker(f"w{i}", base_url=f"http://w{i}:8000") for i in range(4)]
    await hold(index, workers[2], TOKENS, blocks=50)
    await hold(index, workers[1], TOKENS, blocks=20)
    router = RouterClient(index, StaticFleet(pool(*workers)), RouterSettings(deadline_ms=None))
    choice = await router.reserve(PROMPT, dry_run=True)
    assert (choice.worker_id, choice.url, choice.headers, choice.source) == ("w2", "http://w2:8000", {}, None)
    assert choice.predicted_cached_tokens == 800
    assert choice.result == choice.ranking.results[0] == (await router.rank(PROMPT)).results[0]
    assert len(choice.ranking) == 4
    text = choice.explain()
    assert "w2 at http://w2:8000" in text
    assert "50 of 63 blocks resident, 800 tokens usable" in text
    assert "us more: w1" in text
    assert (router.counters.routed, router.counters.required_blocks, router.counters.overlap_blocks) == (1, 63, 50)


async def test_the_client_finds_the_holders_of_a_block_and_of_those_behind_it() -> None:
    index, first, second = MemoryIndex(), *unpack_hashes(extend_chain(TOKENS, 16))[:2]
    await hold(index, worker("a"), TOKENS, blocks=2)
    await hold(index, worker("b"), TOKENS, blocks=1, tier=Tier.CPU_DRAM)
    router = RouterClient(index, StaticFleet(pool(worker("a"), worker("b"))))
    found = [(one.worker_id, one.tier) for one in await router.locate(SCOPE, first)]
    assert found == [("a", Tier.HBM), ("b", Tier.CPU_DRAM)]
    assert [one.sequence_hash for one in await router.children(SCOPE)] == [first, first]
    assert [(one.sequence_hash, one.worker_id) for one in await router.children(SCOPE, first)] == [(second, "a")]
    with pytest.raises(NotSupported, match="CountingIndex: it answers overlaps only"):
        await RouterClient(CountingIndex(index), StaticFleet({})).locate(SCOPE, first)


async def test_a_client_hashes_the_common_start_of_prompts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ChainCache()
    monkeypatch.setattr("router_client.client.ChainCache", lambda: memory)
    router = RouterClient(MemoryIndex(), StaticFleet(pool(worker("w"))), RouterSettings(deadline_ms=None))
    await router.reserve(Prompt.of_tokens(SCOPE, range(16 * 500)), dry_run=True)
    assert memory.hashed_blocks == 500
    longer = Prompt.of_tokens(SCOPE, range(16 * 520))
    await router.reserve(longer, dry_run=True)
    assert memory.hashed_blocks <= 500 + 20 + PIECE_BLOCKS
    of_their_own = ChainCache()
    await router.reserve(replace(longer, memory=of_their_own), dry_run=True)
    assert (of_their_own.hashed_blocks, memory.hashed_blocks <= 500 + 20 + PIECE_BLOCKS) == (520, True)


async def test_a_choice_can_be_carried_out() -> None:
    record = worker("pod-dp3", dp_rank=3, base_url="http://127.0.0.1:1", advertised_url="http://pod:8000")
    choice = await RouterClient(MemoryIndex(), StaticFleet(pool(record))).reserve(PROMPT, dry_run=True)
    assert choice.url == "http://pod:8000"
    assert choice.headers == {"X-Data-Parallel-Rank": "3"}
    assert choice.role is Role.BOTH


async def test_a_choice_names_the_worker_to_read_a_copy_from() -> None:
    index = MemoryIndex()
    full = worker("full", state=EngineState.DRAINING, **PEER)
    await hold(index, full, TOKENS)
    choice = await RouterClient(index, StaticFleet(pool(full, worker("free", **PEER)))).reserve(
        replace(PROMPT, fetch_by=FETCH_BY), dry_run=True
    )
    assert (choice.worker_id, choice.source, choice.predicted_cached_tokens) == ("free", "full", 992)
    assert "992 more read from full" in choice.explain()


async def test_hints_are_completed_by_the_fallbacks(index: ResidencyIndex) -> None:
    w1, w2 = worker("w1"), worker("w2")
    await hold(index, w2, TOKENS)
    router_settings = RouterSettings(fallbacks=Fallbacks("model", "tokenizer", block_tokens=16), deadline_ms=None)
    router = RouterClient(index, StaticFleet(pool(w1, w2)), router_settings)
    hashes = tuple(unpack_hashes(extend_chain(TOKENS, 16)))
    for given in ({"token_ids": TOKENS}, {"block_hashes": hashes}):
        choice = await router.reserve(RequestHints.parse({"request_id": "r", **given}), dry_run=True)
        assert (choice.worker_id, choice.result.overlap_blocks) == ("w2", 62)
    shape = RequestHints.parse({"request_id": "r", "token_ids": TOKENS}).to_shape(router_settings.fallbacks)
    assert (await router.reserve(shape, dry_run=True)).result.overlap_blocks == 62


async def test_equal_prompts_get_equal_answers_and_ties_spread() -> None:
    fleet = StaticFleet(pool(*(worker(f"w{i}") for i in range(4))))
    routers = [RouterClient(MemoryIndex(), fleet) for _ in range(2)]
    picked: dict[str, int] = {}
    for number in range(400):
        prompt = Prompt.of_tokens(SCOPE, [number] * 40)
        first, second = [await router.reserve(prompt, dry_run=True) for router in routers]
        assert first == second
        picked[first.worker_id] = picked.get(first.worker_id, 0) + 1
    assert len(picked) == 4
    assert min(picked.values()) > 60


@pytest.mark.parametrize("tokens", [[1], [], list(range(15))])
async def test_a_prompt_without_a_full_block_is_routed(tokens: list[int]) -> None:
    choice = await RouterClient(MemoryIndex(), StaticFleet(pool(worker("w1")))).reserve(
        Prompt.of_tokens(SCOPE, tokens), dry_run=True
    )
    assert (choice.worker_id, choice.predicted_cached_tokens) == ("w1", 0)
    assert choice.result.required_blocks == bool(tokens)  # the partial last block counts


async def test_workers_that_have_announced_nothing_share_the_prompts() -> None:
    fleet = StaticFleet(pool(*(worker(f"w{i}", block_size=None) for i in range(4))))
    router = RouterClient(MemoryIndex(), fleet)
    picked = {
        (await router.reserve(Prompt.of_tokens(SCOPE, [number] * 100), dry_run=True)).worker_id for number in range(100)
    }
    assert len(picked) == 4


async def test_no_worker_is_one_clear_line() -> None:
    router = RouterClient(MemoryIndex(), StaticFleet({}))
    assert len(await router.rank(PROMPT)) == 0
    with pytest.raises(NoWorkers, match=r"model model, tokenizer tokenizer.* has no workers") as caught:
        await router.reserve(PROMPT, dry_run=True)
    assert len(str(caught.value).splitlines()) == 1
    assert router.counters.no_workers == 1


async def test_an_error_names_the_workers_that_can_not_serve() -> None:
    silent = worker("w2", liveness=Liveness.LOST, state=EngineState.DRAINING)
    records = pool(worker("w1", state=EngineState.ASLEEP), silent)
    router = RouterClient(MemoryIndex(), StaticFleet(records))
    with pytest.raises(
        NoWorkers, match=r"none of 2 workers can take the request: w1 \(its engine is asleep\), w2 \(no heartbeat\)"
    ):
        await router.reserve(PROMPT, dry_run=True)
    assert (await router.rank(PROMPT)).left_out == {"w1": "its engine is asleep", "w2": "no heartbeat"}


async def test_another_models_workers_are_no_candidates() -> None:
    others = [worker(f"w{i}", scope=Scope(f"model-{i}" * 50, "tokenizer")) for i in range(10)]
    fleet = CountingFleet(pool(worker("a", scope=Scope("a", "a")), worker("b", scope=Scope("a", "a")), *others))
    router = RouterClient(MemoryIndex(), fleet)
    for readings in (2, 3):  # the second time, the pool alone is read
        with pytest.raises(NoWorkers, match=r"There are workers for 'a', 'model-0.* and 3 more$") as caught:
            await router.reserve(PROMPT, dry_run=True)
        assert len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < 1_500
        assert fleet.readings == readings
    with pytest.raises(NoWorkers, match=r"tokenizer\?$"):  # a tenant must not learn which models others use
        await router.reserve(Prompt.of_tokens(Scope("model", "tokenizer", tenant_id="t"), TOKENS), dry_run=True)


async def test_adapters_and_tenants_share_the_pools_workers() -> None:
    router = RouterClient(MemoryIndex(), StaticFleet(pool(worker("w1"))))
    scope = Scope("model", "tokenizer", "adapter", "tenant")
    assert (await router.reserve(Prompt.of_tokens(scope, TOKENS), dry_run=True)).worker_id == "w1"


async def test_the_profile_can_be_chosen() -> None:
    router = RouterClient(
        MemoryIndex(), StaticFleet(pool(worker("w1"))), RouterSettings(profile=QuillcacheProfile(decode_us_per_token=0))
    )
    choice = await router.reserve(PROMPT, dry_run=True)
    assert choice.cost.profile == "quillcache"
    assert choice.cost.score_us == 45_000


async def test_a_bad_token_id_is_refused_when_its_block_is_hashed() -> None:
    router = RouterClient(MemoryIndex(), StaticFleet(pool(worker("w1"))))
    with pytest.raises(InvalidValue, match="4294967296"):
        await router.reserve(Prompt.of_tokens(SCOPE, [1] * 20 + [1 << 32]), dry_run=True)


async def test_several_block_sizes_fail_as_one_error() -> None:
    records = pool(worker("w1", block_size=16), worker("w2", block_size=32))
    with pytest.raises(InvalidValue, match="token id -1"):
        await RouterClient(MemoryIndex(), StaticFleet(records)).reserve(
            Prompt.of_tokens(SCOPE, [1, -1] * 40), dry_run=True
        )


# ---------------------------------------------------------------- opened from a URL


async def test_a_client_reads_the_store_that_an_indexer_writes(store: Store, valkey_url: str) -> None:
    index = await open_redis_index(store, shards=2, writer=True)
    workers = [worker("w1", base_url="http://w1:1"), worker("w2", base_url="http://w2:1")]
    await FleetStore(store).write(pool(*workers))
    await hold(index, workers[1], TOKENS)
    async with RouterClient.open(valkey_url, RouterSettings(deadline_ms=None), wait=False) as router:
        choice = await router.reserve(PROMPT, dry_run=True)
        assert (choice.worker_id, choice.url, choice.predicted_cached_tokens) == ("w2", "http://w2:1", 992)


async def test_an_open_client_has_loaded_all_functions_so_that_its_first_choice_is_not_late(
    store: Store, valkey_url: str
) -> None:
    await open_redis_index(store, writer=True)
    async with RouterClient.open(valkey_url, wait=False):
        for library in (FLEET_LIBRARY, INDEX_LIBRARY, POOL_LIBRARY):
            assert await store.client.exists(mark_key(library.name))
            assert library.name in await store.list_libraries()


async def test_a_store_without_an_index_is_one_clear_line(store: Store, valkey_url: str) -> None:
    with pytest.raises(LayoutMismatch, match="start an indexer"):
        async with RouterClient.open(valkey_url, wait=False):
            pass


async def test_a_router_that_starts_before_the_first_indexer_waits_for_it(store: Store, valkey_url: str) -> None:
    opened, lines = anyio.Event(), list[str]()

    async def open_router() -> None:
        async with RouterClient.open(valkey_url, on_wait=lines.append):
            opened.set()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(open_router)
            await until(lambda: lines, what="the router waits")
            assert "start an indexer first; retrying in 0.25 s" in lines[0]
            await open_redis_index(store, writer=True)
            await opened.wait()


@pytest.mark.parametrize(
    ("url", "error", "text"),
    [
        ("redis://127.0.0.1:1", Unreachable, "127.0.0.1:1"),
        ("http://127.0.0.1:6379", InvalidValue, "expected redis://"),
    ],
)
async def test_an_error_names_the_wrong_address(url: str, error: Any, text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        async with RouterClient.open(url, wait=False):
            pass
    assert len(str(caught.value).splitlines()) == 1


async def test_a_store_that_goes_away_is_one_clear_line() -> None:
    with ValkeyProcess() as server:
        async with connected_store(server.url, wait=False) as store:
            await open_redis_index(store, writer=True)
            await FleetStore(store).write(pool(worker("w1")))
        async with RouterClient.open(server.url, wait=False) as router:
            assert (await router.rank(PROMPT)).results[0].worker_id == "w1"
            server.kill()
            with pytest.raises(Unreachable, match=str(server.port)) as caught:
                await router.overlap(PROMPT)
            assert len(str(caught.value).splitlines()) == 1


async def test_only_a_2xx_finishes() -> None:
    """A prompt with another answer does not count as cached, because it is unknown whether it was computed."""
    for status, believed in ((200, True), (204, True), (500, False), (429, False), (404, False), (0, False)):
        router = RouterClient(MemoryIndex(), StaticFleet(pool(worker("w1", load={}))), RouterSettings(deadline_ms=None))
        choice = await router.reserve(PROMPT)
        await choice.done(status=status)
        again = await router.reserve(PROMPT, dry_run=True)
        assert (again.unconfirmed_tokens > 0) is believed, status
        assert again.cost.amounts[4] == 1, status  # no other request is running there
