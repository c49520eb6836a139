"""LiteLLM's own Router in front of simulated engines, with kvatlas choosing."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.store.connection import Store
from kvatlas_router.tokens import BudgetedTokenizer, ThreadedTokenizer, TokenizerBudget
from kvatlas_router.tokens.local_tokenizer import LocalTokenizer
from kvatlas_simulator.http.chat_template import render
from router_client import Prompt, RouterSettings, SyncRouterClient
from tests.eventually import until, until_sync
from tests.lazy_module import LazyModule
from tests.router.proxy.engines import MODEL, SCOPE, Fleet, running_fleet
from tests.router.proxy.raw_engine import raw_engine
from tests.router.tokens.small_model import save_simulators
from tests.router_client.pools import pool, worker

if TYPE_CHECKING:
    import litellm
    from litellm.llms.custom_httpx import async_client_cleanup

    import kvatlas_router.litellm as ours
    from examples import litellm_router
else:
    litellm = LazyModule("litellm")
    async_client_cleanup = LazyModule("litellm.llms.custom_httpx.async_client_cleanup")
    ours = LazyModule("kvatlas_router.litellm")
    litellm_router = LazyModule("examples.litellm_router")

# the warnings are LiteLLM's own
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

MESSAGES = [{"role": "user", "content": "Who holds this prefix, and how much of it? " * 40}]
CHAT: dict[str, Any] = {"model": "group", "messages": MESSAGES, "max_tokens": 3}
TOKENS = list(render(MESSAGES).encode())
ERROR = b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\n{}"
ONE = {"w1": {"num_gpu_blocks": 4_096}}
TWO = {**ONE, "w2": {"num_gpu_blocks": 4_096}}
COOLING: dict[str, Any] = {"disable_cooldowns": False, "allowed_fails": 0, "cooldown_time": 600.0}


@pytest.fixture(autouse=True)
def _forgetful() -> Iterator[None]:
    """LiteLLM keeps callbacks for the whole process."""
    yield
    assert not litellm.logging_callback_manager.get_custom_loggers_for_type(ours.KvatlasRouting)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BudgetedTokenizer]:
    """The simulated engines' tokenizer, from its files."""
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    save_simulators(folder)
    threads = ThreadedTokenizer(LocalTokenizer.from_folder(folder).prompt_tokens)
    yield BudgetedTokenizer(threads, TokenizerBudget(deadline_ms=20_000))
    threads.close()


def deployment(url: str, **changed: Any) -> dict[str, Any]:
    params = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    return {"model_name": "group", "litellm_params": params, **changed}


class LiteRouter:
    """LiteLLM's Router over some engines, with kvatlas."""

    def __init__(
        self,
        router: "litellm.Router",
        routing: "ours.KvatlasRouting",
        client: SyncRouterClient,
        urls: Mapping[str, str],
    ) -> None:
        self.router, self.routing, self.client = router, routing, client
        self.workers = {f"{url}/v1": worker_id for worker_id, url in urls.items()}

    def by(self, answer: Any) -> str:
        """The worker that answered."""
        worker_id: str = self.workers[answer._hidden_params["api_base"]]
        return worker_id

    async def booked(self) -> dict[str, int]:
        """Requests booked on each worker, as any router sees them."""
        ranking = await asyncio.wrap_future(
            self.client.submit(lambda client: client.rank(Prompt.of_tokens(SCOPE, [1])))
        )
        return {result.worker_id: result.cost.amounts[4] - 1 for result in ranking}

    def load_of(self, worker_id: str) -> tuple[int, int]:
        """(requests, queued tokens) booked on a worker, for threads."""
        (result,) = [r for r in self.client.rank(Prompt.of_tokens(SCOPE, [1])) if r.worker_id == worker_id]
        return result.cost.amounts[4] - 1, result.cost.amounts[0]

    async def nothing_is_left(self, held: int) -> None:
        """Wait until the end of every booking was reported, and the store has none."""

        async def none() -> bool:
            return self.routing.held == 0 and not any((await self.booked()).values())

        await until(none, what="no booking is left")
        counters = self.routing.counters
        assert (counters.held, counters.held_done, counters.held_expired) == (held, held, 0)


@asynccontextmanager
async def lite_router(
    fleet: Fleet,
    redis_url: str,
    tokenizer: BudgetedTokenizer | None,
    urls: Mapping[str, str] | None = None,
    held_s: float = 600.0,
    **changed: Any,
) -> AsyncIterator[LiteRouter]:
    """`urls`: engines in addition to those of the fleet, by worker."""
    known = {**fleet.urls, **(urls or {})}
    for worker_id in known:
        await fleet.report(worker_id, known[worker_id])
    router = litellm.Router(
        model_list=[deployment(url) for url in known.values()],
        **{"num_retries": 0, "disable_cooldowns": True, **changed},
    )
    settings = RouterSettings(deadline_ms=None)
    with (
        SyncRouterClient.open(redis_url, settings) as client,
        ours.KvatlasRouting(router, client, tokenizer, held_s=held_s) as r,
    ):
        yield LiteRouter(router, r, client, known)
        await async_client_cleanup.close_litellm_async_clients()  # engines wait for connections that are kept open
        litellm.in_memory_llm_clients_cache.flush_cache()


# ---------------------------------------------------------------- where requests go


async def test_a_chat_goes_to_the_worker_that_holds_its_prefix(
    store: Store, valkey_url: str, tokenizer: BudgetedTokenizer
) -> None:
    async with running_fleet(store, TWO) as fleet:
        for worker_id in ("w2", "w1"):
            await fleet.index.clear()
            await fleet.holds(worker_id, TOKENS)
            async with lite_router(fleet, valkey_url, tokenizer) as lite:
                for _ in range(5):
                    assert lite.by(await lite.router.acompletion(**CHAT)) == worker_id
                    assert lite.by(await asyncio.to_thread(lite.router.completion, **CHAT)) == worker_id
                await lite.nothing_is_left(10)
                assert lite.routing.counters.left == 0


async def test_a_completion_goes_to_the_worker_that_holds_its_prefix(
    store: Store, valkey_url: str, tokenizer: BudgetedTokenizer
) -> None:
    text = "Once upon a time, " * 50
    async with running_fleet(store, TWO) as fleet, lite_router(fleet, valkey_url, tokenizer) as lite:
        await fleet.holds("w2", list(text.encode()))
        for _ in range(4):
            answer = await lite.router.atext_completion(model="group", prompt=text, max_tokens=2)
            assert answer.usage.prompt_tokens == len(text)
            assert lite.by(answer) == "w2"
        await lite.nothing_is_left(4)


async def test_without_tokens_load_decides(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, TWO) as fleet, lite_router(fleet, valkey_url, None) as lite:
        await fleet.holds("w2", TOKENS)
        await fleet.report("w2", queued_prefill_tokens=9_000)
        assert lite.by(await lite.router.acompletion(**CHAT)) == "w1"
        await lite.nothing_is_left(1)


async def test_the_rank_of_a_data_parallel_engine_is_sent(store: Store, valkey_url: str) -> None:
    async with (
        raw_engine(ERROR) as engine,
        running_fleet(store, {}) as fleet,
        lite_router(fleet, valkey_url, None, {"i": engine.url}) as lite,
    ):
        ranks = [
            worker(f"i-dp{n}", scope=SCOPE, base_url=engine.url, dp_rank=n, load={"running_decodes": 8 - 6 * n})
            for n in (0, 1)
        ]
        await FleetStore(store).forget("i", SCOPE.pool_id)
        for headers in (None, {"X-Tenant": "a"}):
            await FleetStore(store).write(pool(*ranks))  # loads are known for 5 s
            with pytest.raises(litellm.InternalServerError):
                await lite.router.acompletion(**CHAT, extra_headers=headers)
            head = engine.heads[-1].lower()
            assert "x-data-parallel-rank: 1" in head
            assert ("x-tenant: a" in head) == (headers is not None)


# ---------------------------------------------------------------- what LiteLLM keeps


async def test_a_deployment_that_cools_down_is_not_chosen(
    store: Store, valkey_url: str, tokenizer: BudgetedTokenizer
) -> None:
    async with (
        raw_engine(ERROR) as broken,
        running_fleet(store, ONE) as fleet,
        lite_router(fleet, valkey_url, tokenizer, {"w2": broken.url}, **COOLING) as lite,
    ):
        await fleet.holds("w2", TOKENS)
        with pytest.raises(litellm.InternalServerError):
            await lite.router.acompletion(**CHAT)
        for _ in range(4):
            assert lite.by(await lite.router.acompletion(**CHAT)) == "w1"
            assert lite.by(await asyncio.to_thread(lite.router.completion, **CHAT)) == "w1"
        assert len(broken.heads) == 1
        await lite.nothing_is_left(9)


class Refusing:
    """A routing plugin that leaves no candidate."""

    async def run(self, context: Any) -> Any:
        context.candidate_models = []
        return context


async def test_litellm_plugins_narrow_the_candidates(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, ONE) as fleet, lite_router(fleet, valkey_url, None, plugins=[Refusing()]) as lite:
        with pytest.raises(ValueError, match="No deployments left after routing-plugin"):
            await lite.router.acompletion(**CHAT)
        with pytest.raises(ValueError, match="routing-plugin pipeline"):
            await asyncio.to_thread(lite.router.completion, **CHAT)
        assert lite.routing.counters.held == 0


async def test_a_retry_leaves_no_booking_of_the_first_try(
    store: Store, valkey_url: str, tokenizer: BudgetedTokenizer
) -> None:
    async with (
        raw_engine(ERROR) as broken,
        running_fleet(store, ONE) as fleet,
        lite_router(fleet, valkey_url, tokenizer, {"w2": broken.url}, num_retries=2, **COOLING) as lite,
    ):
        await fleet.holds("w2", TOKENS)
        assert lite.by(await lite.router.acompletion(**CHAT)) == "w1"
        assert len(broken.heads) == 1
        await lite.nothing_is_left(2)


async def test_litellm_chooses_if_kvatlas_knows_no_worker(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, TWO) as fleet, lite_router(fleet, valkey_url, None) as lite:
        for worker_id in fleet.urls:
            await FleetStore(store).forget(worker_id, SCOPE.pool_id)
        assert lite.by(await lite.router.acompletion(**CHAT)) in fleet.urls
        assert lite.by(await asyncio.to_thread(lite.router.completion, **CHAT)) in fleet.urls
        assert (lite.routing.counters.left, lite.routing.counters.held) == (2, 0)


async def test_litellm_chooses_if_the_client_is_closed(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, TWO) as fleet, lite_router(fleet, valkey_url, None) as lite:
        lite.client.__exit__(None, None, None)
        assert lite.by(await lite.router.acompletion(**CHAT)) in fleet.urls
        assert lite.by(await asyncio.to_thread(lite.router.completion, **CHAT)) in fleet.urls
        assert lite.routing.counters.left == 2


async def test_litellm_chooses_as_before_after_leaving(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, TWO) as fleet:
        async with lite_router(fleet, valkey_url, None) as lite:
            pass
        before = set(vars(litellm.Router(model_list=[])))
        assert set(vars(lite.router)) <= before
        assert lite.by(await lite.router.acompletion(**CHAT)) in fleet.urls
        await async_client_cleanup.close_litellm_async_clients()


# ---------------------------------------------------------------- how bookings end


@pytest.mark.parametrize("usage", [False, True], ids=["", "with usage"])
async def test_a_stream_holds_its_worker_until_its_end(
    store: Store, valkey_url: str, tokenizer: BudgetedTokenizer, usage: bool
) -> None:
    streamed = {**CHAT, "stream": True, **({"stream_options": {"include_usage": True}} if usage else {})}
    async with running_fleet(store, TWO) as fleet, lite_router(fleet, valkey_url, tokenizer) as lite:
        await fleet.holds("w2", TOKENS)
        async for _ in await lite.router.acompletion(**streamed):
            assert lite.routing.held == 1 and await lite.booked() == {"w1": 0, "w2": 1}
        await lite.nothing_is_left(1)

        def read() -> None:
            stream = lite.router.completion(**streamed)
            next(stream)
            until_sync(lambda: lite.load_of("w2") == (1, 0), what="its first token is reported")
            for _ in stream:
                pass

        await asyncio.to_thread(read)
        await lite.nothing_is_left(2)


async def test_the_booking_of_a_stream_that_is_not_read_to_its_end_expires(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, TWO) as fleet, lite_router(fleet, valkey_url, None, held_s=0.2) as lite:
        stream = await lite.router.acompletion(**CHAT, stream=True)
        await anext(aiter(stream))

        async def released() -> bool:
            return lite.routing.held == 0 and not any((await lite.booked()).values())

        await until(released, what="the booking is released")
        assert (lite.routing.counters.held_expired, lite.routing.counters.held_done) == (1, 0)


async def test_leaving_releases_all_bookings(store: Store, valkey_url: str) -> None:
    async with running_fleet(store, TWO) as fleet, lite_router(fleet, valkey_url, None) as lite:
        stream = await lite.router.acompletion(**CHAT, stream=True)
        await anext(aiter(stream))
        assert sum((await lite.booked()).values()) == 1
        lite.routing.__exit__(None, None, None)

        async def released() -> bool:
            return not any((await lite.booked()).values())

        await until(released, what="the booking is released")
        lite.routing.__enter__()


async def test_the_example_runs(
    store: Store, valkey_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KVATLAS_REDIS_URL", valkey_url)
    save_simulators(tmp_path)
    async with running_fleet(store, TWO) as fleet:
        await asyncio.to_thread(litellm_router.main, MODEL, str(tmp_path), *fleet.urls.values())
    *answers, counters = capsys.readouterr().out.splitlines()
    assert len(answers) == 2 and all("tokens were cached" in line for line in answers)
    assert "held=2" in counters and "left=0" in counters
