"""`kvatlas audit` of a small installation (a replica, publishers, servers), and then of one with a damaged index."""

import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import anyio
import pytest

from kvatlas.blocks.hashing import extend_chain
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.stream import StreamSettings, ensure_stream
from kvatlas.embedded import EmbeddedServer, nats_server, valkey_server
from kvatlas.identity import Scope
from kvatlas.index.redis.index import RedisIndex, open_redis_index
from kvatlas.store.connection import connected_store
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.settings import PublisherSettings
from tests.end_to_end.processes import environment
from tests.indexer.running_replica import running_replica
from tests.kvatlas.index.damage import Damage

pytestmark = pytest.mark.anyio

SCOPE = Scope("m", "m")
LORA = Scope("m", "m", "lora")
TOKENS = list(range(4 * 30))
CHAIN = extend_chain(TOKENS, 4)


def block(number: int) -> bytes:
    return CHAIN[8 * number : 8 * number + 8]


class Installation:
    def __init__(self, nats: EmbeddedServer, valkey: EmbeddedServer, index: RedisIndex) -> None:
        self.nats, self.valkey, self.index = nats, valkey, index

    @asynccontextmanager
    async def publisher(self, worker_id: str) -> AsyncIterator[Publisher]:
        """The publisher of a worker with 30 blocks, ten of them in host memory too, and five of an adapter."""
        settings = PublisherSettings(worker_id=worker_id, model_id="m", block_size=4)
        async with Publisher(settings, nats=self.nats.url) as publisher:
            blocks = await publisher.stored(TOKENS)
            await publisher.stored(TOKENS[: 4 * 10], tier=Tier.CPU_DRAM)
            await publisher.stored(TOKENS[: 4 * 5], adapter="lora")
            assert len(blocks) == 30
            await publisher.flush()
            yield publisher

    @asynccontextmanager
    async def running(self, *worker_ids: str) -> AsyncIterator[list[Publisher]]:
        """Run a replica and the publishers of these workers."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(running_replica(self.nats.url, self.valkey.url))
            yield [await stack.enter_async_context(self.publisher(worker_id)) for worker_id in worker_ids]

    async def audit(self, *flags: str) -> tuple[int, Any, str]:
        """Run the command: (exit code, printed JSON, stderr)."""
        words = ["audit", "--json", "--nats-url", self.nats.url, "--redis-url", self.valkey.url, *flags]
        with anyio.fail_after(60):
            done = await anyio.run_process(
                [sys.executable, "-m", "kvatlas_cli.main", *words], check=False, env=environment()
            )
        return done.returncode, json.loads(done.stdout or b"null"), done.stderr.decode()


@pytest.fixture
async def installation() -> AsyncIterator[Installation]:
    async with nats_server() as nats, valkey_server() as valkey:
        client = await connect_nats(nats.url, name="test", wait=False)
        await ensure_stream(client, StreamSettings(storage="memory"))
        await client.close()
        async with connected_store(valkey.url, wait=False) as store:
            index = await open_redis_index(store, writer=True)
            yield Installation(nats, valkey, index)


def verdicts(printed: Any) -> dict[str, str]:
    return {one["worker"]: one["verdict"] for one in printed}


async def test_an_intact_index_is_equal_and_a_damaged_one_differs(installation: Installation) -> None:
    async with installation.running("w0", "w1"):
        code, printed, err = await installation.audit()
        assert (code, verdicts(printed), err) == (0, {"w0": "equal", "w1": "equal"}, "")
        assert [one["blocks"] for one in printed] == [45, 45]

        damage = Damage(installation.index, "w1")
        await damage.take(SCOPE, block(29))
        await damage.change_flags(LORA, block(4), Tier.LOCAL_SSD.flag)
        code, printed, _ = await installation.audit()
        assert (code, verdicts(printed)) == (1, {"w0": "equal", "w1": "differs"})
        found = [(one["adapter_id"], one["tier"], one["told"], one["held"]) for one in printed[1]["differences"]]
        assert found == [(None, "hbm", 30, 29), ("lora", "hbm", 5, 4), ("lora", "local_ssd", 0, 1)]
        assert (await installation.audit("--worker", "w0"))[0] == 0

        damage = Damage(installation.index, "w0")
        await damage.change_flags(SCOPE, block(3), Tier.HBM.flag | Tier.CPU_DRAM.flag | 1 << 6)
        code, printed, _ = await installation.audit("--worker", "w0")
        assert (code, verdicts(printed), printed[0]["differences"]) == (1, {"w0": "differs"}, [])
        assert "flags" in printed[0]["note"]
        await damage.change_flags(SCOPE, block(3), Tier.HBM.flag | Tier.CPU_DRAM.flag)
        await installation.index._store.client.hdel(
            damage.keys.active, await damage.number()
        )  # routers no longer see the worker
        assert (await installation.audit("--worker", "w0"))[0] == 1


async def test_a_worker_without_a_publisher_is_unanswered_unless_it_has_drained(installation: Installation) -> None:
    async with installation.running("w0"):
        async with installation.publisher("w1"):
            assert (await installation.audit())[0] == 0
        code, printed, _ = await installation.audit()
        assert (code, verdicts(printed)) == (1, {"w0": "equal", "w1": "unanswered"})
        async with installation.publisher("w1") as stopped:
            await stopped.close_gently()
        code, printed, _ = await installation.audit()
        assert (code, verdicts(printed)) == (0, {"w0": "equal", "w1": "drained"})


async def test_a_busy_worker_gets_a_verdict_too(installation: Installation) -> None:
    """Its publisher keeps publishing during the audit."""
    async with installation.running("w0") as publishers, anyio.create_task_group() as group:
        [publisher] = publishers

        async def work() -> None:
            at = 0
            while True:
                tokens = list(range(1_000_000 + 40 * at, 1_000_040 + 40 * at))
                await publisher.removed(await publisher.stored(tokens))
                at += 1
                await anyio.sleep(0.001)

        group.start_soon(work)
        code, printed, _ = await installation.audit()
        group.cancel_scope.cancel()
    assert (code, printed[0]["verdict"] in ("equal", "proven")) == (0, True)


async def test_an_index_without_an_indexer_is_behind(installation: Installation) -> None:
    async with installation.publisher("w0"):
        code, printed, _ = await installation.audit("--deadline", "0.3", "--worker", "w0")
        assert (code, verdicts(printed)) == (1, {"w0": "behind"})
        assert "does not know the worker" in printed[0]["note"]


async def test_an_unreachable_nats_is_reported_in_one_line(installation: Installation) -> None:
    code, printed, err = await installation.audit("--nats-url", "nats://127.0.0.1:1", "--no-wait")
    assert (code, printed) == (1, None)
    assert err.count("\n") == 1 and "127.0.0.1:1" in err
