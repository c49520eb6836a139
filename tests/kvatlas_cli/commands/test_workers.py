"""`kvatlas workers` against a real store."""

import asyncio
import json

from kvatlas.blocks.tiers import Tier
from kvatlas.events import ScopeUse
from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import connected_store
from tests.kvatlas_cli.conftest import BLOCK_SIZE, CHAIN, SCOPE, Cli


def test_workers_are_printed_as_json(cli: Cli, fleet_store_url: str) -> None:
    done = cli("workers", "--json", "--redis-url", fleet_store_url)
    assert (done.code, done.err) == (0, "")
    found = {entry["worker"]: entry for entry in json.loads(done.out)}
    assert found["w1"]["blocks"] == 4 and found["w2"]["blocks"] == 1
    assert found["w1"]["state"] == "up" and found["w1"]["liveness"] == "alive" and found["w1"]["routable"] is True
    assert found["w1"]["load"]["running_decodes"] == 3
    assert found["w1"]["incarnation"] == str((1 << 63) + 1)


def test_workers_are_printed_as_a_table_with_one_line_each(cli: Cli, fleet_store_url: str) -> None:
    done = cli("workers", "--redis-url", fleet_store_url)
    assert done.code == 0 and "2 workers" in done.out
    for worker_id in ("w1", "w2"):
        assert len([line for line in done.out.splitlines() if worker_id in line]) == 1


def test_top_and_workers_say_the_same(cli: Cli, fleet_store_url: str) -> None:
    printed = [cli(command, "--redis-url", fleet_store_url).out for command in ("workers", "top")]
    tables = [[line.split("│")[:-2] for line in out.splitlines() if "│" in line] for out in printed]  # all but the age
    assert tables[0] == tables[1] and len(tables[0]) == 2


def test_of_a_worker_that_tells_an_upper_bound_at_most_all_blocks_are_resumable(cli: Cli, fleet_store_url: str) -> None:
    async def fill() -> None:
        async with connected_store(fleet_store_url, wait=False) as store:
            index = await open_redis_index(store, writer=True)
            await index.put(ScopeUse(SCOPE, BLOCK_SIZE, 1024), "bounded", Tier.HBM, CHAIN)
            known = (await FleetStore(store).all())["w1"]
            endpoint = known.endpoint.model_copy(update={"id": "bounded", "upper_bound": "full attention only"})
            await FleetStore(store).write({"bounded": known.model_copy(update={"endpoint": endpoint})})

    asyncio.run(fill())
    done = cli("workers", "--redis-url", fleet_store_url, COLUMNS="200")
    resumable = {
        line.split("│")[1].strip(): line.split("│")[7].strip() for line in done.out.splitlines() if "│" in line
    }
    assert (resumable["w1"], resumable["bounded"]) == ("all", "at most all")
