"""The sync client: the same calls and answers as the async one, for threads, with a clean end."""

import asyncio
import inspect
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FunctionType
from typing import Any

import pytest
import redis
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvatlas.blocks.residency import Overlap
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.index.memory.index import MemoryIndex
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import connected_store
from router_client import (
    Choice,
    ClientClosed,
    InvalidValue,
    NoWorkers,
    PairChoice,
    Prompt,
    RouterClient,
    RouterSettings,
    StaticFleet,
    SyncChoice,
    SyncPairChoice,
    SyncRouterClient,
    Unreachable,
)
from router_client.loop_thread import LoopThread
from tests.eventually import until_sync
from tests.router_client.pools import SCOPE, hold, pool, worker

TOKENS = list(range(1_000))
PROMPT = Prompt.of_tokens(SCOPE, TOKENS, id="r-1")
SETTINGS = RouterSettings(deadline_ms=None)


@pytest.fixture
def store(valkey_url: str) -> str:
    """The URL of a store with four workers of equal load, of which w1 holds 20 blocks of the prompt and w2 50."""

    async def fill() -> None:
        async with connected_store(valkey_url, wait=False) as opened:
            await opened.client.flushall()
            index = await open_redis_index(opened, shards=2, writer=True)
            workers = [worker(f"w{i}", base_url=f"http://w{i}:8000", load={"running_decodes": 1}) for i in range(4)]
            await FleetStore(opened).write(pool(*workers))
            await hold(index, workers[1], TOKENS, blocks=20)
            await hold(index, workers[2], TOKENS, blocks=50)

    asyncio.run(fill())
    return valkey_url


def in_process(index: "MemoryIndex | Silent | None" = None) -> SyncRouterClient:
    return SyncRouterClient(RouterClient(index or MemoryIndex(), StaticFleet(pool(worker("a"), worker("b"))), SETTINGS))


def short(number: int) -> Prompt:
    return Prompt.of_tokens(SCOPE, [number] * 100)


def booked(router: SyncRouterClient) -> list[int]:
    """Number of requests booked on each worker, as the next request would find it."""
    return sorted(r.cost.amounts[4] - 1 for r in router.rank(short(0)))


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kvatlas router")}


class Silent:
    """An index that never answers."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.given_up = threading.Event()

    async def overlap(
        self, scope: Scope, hashes: bytes, *, first_index: int = 0, limit: int | None = None, verify: bool = False
    ) -> Overlap:
        self.asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.given_up.set()
        raise AssertionError


# ---------------------------------------------------------------- the same


def public(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


def parameters(function: Callable[..., object]) -> list[tuple[str, Any, Any, Any]]:
    return [(p.name, p.kind, p.default, p.annotation) for p in inspect.signature(function).parameters.values()]


def answer(function: Callable[..., object]) -> Any:
    returned = inspect.signature(function).return_annotation
    return {
        Choice: SyncChoice,
        AsyncIterator[Choice]: Iterator[SyncChoice],
        PairChoice: SyncPairChoice,
        AsyncIterator[PairChoice]: Iterator[SyncPairChoice],
    }.get(returned, returned)


def test_the_client_has_the_async_clients_calls_and_submit() -> None:
    router = RouterClient(MemoryIndex(), StaticFleet({}))
    with SyncRouterClient(router) as twin:
        assert public(twin) - public(router) == {"submit"}
        assert public(router) - public(twin) == set()
        for name in public(router):
            mine, theirs = inspect.getattr_static(RouterClient, name, None), getattr(SyncRouterClient, name)
            if isinstance(mine, FunctionType):
                assert parameters(mine) == parameters(theirs), name
                assert answer(mine) == answer(theirs), name
            elif name == "open":
                assert parameters(RouterClient.open) == parameters(SyncRouterClient.open)
            else:  # a property, or an attribute set in the constructor
                assert isinstance(theirs, property), name
                assert getattr(twin, name) == getattr(router, name)


@pytest.mark.parametrize(
    ("choice", "twin", "less"),
    [(Choice, SyncChoice, {"reservation", "feedback", "answered"}), (PairChoice, SyncPairChoice, set())],
)
def test_a_choice_has_the_async_choices_calls(choice: type, twin: type, less: set[str]) -> None:
    assert public(twin) == public(choice) - less
    for name in public(twin):
        mine, theirs = getattr(choice, name), getattr(twin, name)
        assert type(mine) is type(theirs), name
        if isinstance(mine, FunctionType):
            assert not inspect.iscoroutinefunction(theirs), name
            assert inspect.signature(mine) == inspect.signature(theirs), name


def test_the_client_returns_what_the_async_client_returns(store: str) -> None:
    async def ask() -> tuple[Any, ...]:
        async with RouterClient.open(store, SETTINGS, wait=False) as router:
            return await router.overlap(PROMPT), await router.rank(PROMPT), await router.reserve(PROMPT, dry_run=True)

    overlap, ranking, choice = asyncio.run(ask())
    with SyncRouterClient.open(store, SETTINGS, wait=False) as router:
        assert router.overlap(PROMPT) == overlap
        assert router.rank(PROMPT) == ranking
        assert {id: record.endpoint.url for id, record in router.workers(SCOPE).items()} == {
            f"w{i}": f"http://w{i}:8000" for i in range(4)
        }
        twin = router.reserve(PROMPT, dry_run=True)
        assert all(getattr(twin, name) == getattr(choice, name) for name in type(twin).__match_args__)
        assert twin.explain() == choice.explain()
        assert (twin.url, twin.predicted_cached_tokens) == ("http://w2:8000", 800)
        assert router.reserve(PROMPT, avoid=["w2"], dry_run=True).worker_id == "w1"


def test_the_client_raises_what_the_async_client_raises() -> None:
    with in_process() as router:
        with pytest.raises(NoWorkers, match="none of 2 workers"):
            router.reserve(PROMPT, avoid=["a", "b"], dry_run=True)
        with pytest.raises(InvalidValue, match="4294967296"):
            router.reserve(Prompt.of_tokens(SCOPE, [1 << 32] * 20))


def test_the_kill_switch_leaves_load_to_decide() -> None:
    with in_process(Silent()) as router:
        router.load_only = True
        assert router.reserve(PROMPT, dry_run=True).mode == "load"
        assert router.counters.by_load == 1


# ---------------------------------------------------------------- booking


def test_a_reservation_lasts_as_long_as_the_block(store: str) -> None:
    with SyncRouterClient.open(store, SETTINGS) as router, SyncRouterClient.open(store, SETTINGS) as other:
        assert booked(other) == [1, 1, 1, 1]
        with router.route(short(1)) as choice:
            assert booked(other) == [1, 1, 1, 2]
            choice.first_token()
            assert booked(other) == [1, 1, 1, 2]
        until_sync(lambda: booked(other) == [1, 1, 1, 1], what="the end is reported")
        with pytest.raises(ZeroDivisionError), router.route(short(1)):
            raise ZeroDivisionError
        until_sync(lambda: booked(other) == [1, 1, 1, 1], what="the failure is reported")
        assert (router.counters.booked, router.counters.released) == (2, 2)


def test_many_threads_share_one_client(store: str) -> None:
    with SyncRouterClient.open(store, SETTINGS) as router:
        together = threading.Barrier(8)

        def serve(number: int) -> str:
            with router.route(short(number)) as choice:
                together.wait()  # all eight are booked
                choice.first_token()
                return choice.worker_id

        with ThreadPoolExecutor(8) as pool_of_threads:
            for start in range(0, 80, 8):
                picked = list(pool_of_threads.map(serve, range(start, start + 8)))
                assert sorted(picked) == ["w0", "w0", "w1", "w1", "w2", "w2", "w3", "w3"]
        until_sync(lambda: booked(router) == [1, 1, 1, 1], what="every end is reported")
        assert (router.counters.routed, router.counters.booked, router.counters.released) == (80, 80, 80)


# ---------------------------------------------------------------- its end


def connections(url: str) -> int:
    with redis.Redis.from_url(url) as client:
        return len(client.client_list()) - 1


def test_leaving_releases_all_bookings_and_leaves_nothing_behind(store: str) -> None:
    with SyncRouterClient.open(store, SETTINGS) as other:
        assert booked(other) == [1, 1, 1, 1]
        before = connections(store)
        with SyncRouterClient.open(store, SETTINGS) as router:
            choice = router.reserve(short(1))
            assert booked(other) == [1, 1, 1, 2]
            assert connections(store) > before
        assert booked(other) == [1, 1, 1, 1]
        until_sync(lambda: connections(store) == before, what="its connections are closed")
        choice.done()  # nothing is left to end
        with pytest.raises(ClientClosed, match="not open"):
            router.rank(PROMPT)
    assert threads() == set()


def test_a_call_during_the_close_raises_client_closed() -> None:
    index = Silent()
    with ThreadPoolExecutor(1) as asker:
        with in_process(index) as router:
            asked = asker.submit(router.rank, PROMPT)
            assert index.asked.wait(60)
        with pytest.raises(ClientClosed, match="was closed"):
            asked.result(10)
    assert index.given_up.is_set()


def test_an_interrupted_call_is_cancelled() -> None:
    index = Silent()

    def interrupt() -> None:
        assert index.asked.wait(60)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with in_process(index) as router, ThreadPoolExecutor(1) as other:
        interrupted = other.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            router.rank(PROMPT)
        interrupted.result(10)
        assert index.given_up.wait(60)
        router.load_only = True
        assert router.reserve(PROMPT, dry_run=True).mode == "load"


def test_a_call_that_is_interrupted_while_it_starts_is_cancelled() -> None:
    begun, ended = threading.Event(), threading.Event()

    class Interrupted(LoopThread):
        def submit(self, *args: Any, **kwargs: Any) -> Any:
            super().submit(*args, **kwargs)
            assert begun.wait(60)
            raise KeyboardInterrupt  # the loop has the call, but its caller has no future yet

    async def hang() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with Interrupted("interrupted") as thread:
        with pytest.raises(KeyboardInterrupt):
            thread.run(hang)
        assert ended.wait(60)


@pytest.mark.parametrize(("url", "error"), [("redis://127.0.0.1:1", Unreachable), ("http://127.0.0.1", InvalidValue)])
def test_a_client_that_can_not_be_opened_leaves_nothing_behind(url: str, error: type[Exception]) -> None:
    with pytest.raises(error) as caught, SyncRouterClient.open(url, wait=False):
        pass
    assert len(str(caught.value).splitlines()) == 1
    assert threads() == set()


def test_the_client_must_be_entered_before_it_is_used() -> None:
    with pytest.raises(ClientClosed, match="`with` block"):
        in_process().rank(PROMPT)


def test_the_client_does_not_wait_for_itself() -> None:
    with in_process() as router:

        async def ask_again(_: RouterClient) -> None:
            router.rank(PROMPT)

        with pytest.raises(RuntimeError, match="from its own event loop"):
            router.submit(ask_again).result(10)


FORK = """
import os
from kvatlas.index.memory.index import MemoryIndex
from router_client import ClientClosed, Prompt, RouterClient, Scope, StaticFleet, SyncRouterClient

prompt = Prompt.of_tokens(Scope("m", "t"), [1] * 100)
with SyncRouterClient(RouterClient(MemoryIndex(), StaticFleet({}))) as router:
    router.rank(prompt)
    child = os.fork()
    if child == 0:
        try:
            router.rank(prompt)
        except ClientClosed as error:
            print(error, flush=True)
    else:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        print(len(router.rank(prompt)), flush=True)
"""


def test_a_forked_child_gets_an_error_and_the_parent_goes_on() -> None:
    """The child ends without a message about what runs in its parent."""
    command = [sys.executable, "-W", "ignore", "-c", FORK]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    child, parent = done.stdout.splitlines()
    assert (done.returncode, parent, done.stderr) == (0, "0", "")
    assert "forked; open one in process" in child


# ---------------------------------------------------------------- seen from outside


def test_spans_are_children_of_the_callers_span(spans: InMemorySpanExporter) -> None:
    with in_process() as router, trace.get_tracer("test").start_as_current_span("caller"):
        router.reserve(PROMPT, dry_run=True)
    inner, outer = (span for span in spans.get_finished_spans() if span.name != "read pool")
    assert (inner.name, outer.name) == ("route kvatlas", "caller")
    assert inner.parent == outer.context
