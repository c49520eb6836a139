"""`kvatlas locate` and `kvatlas children` against a real store."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from kvatlas.blocks.hashing import unpack_hashes
from kvatlas.blocks.tiers import Tier
from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.events import ScopeUse
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import connected_store
from tests.kvatlas_cli.conftest import BLOCK_SIZE, CHAIN, SCOPE, Cli

FIRST, SECOND, *_ = unpack_hashes(CHAIN)


@pytest.fixture(scope="module")
def side_store() -> Iterator[str]:
    """The URL of a store with a side index, in which w1 holds all four blocks of TOKENS."""
    with ValkeyProcess() as server:
        asyncio.run(_fill(server.url))
        yield server.url


async def _fill(url: str) -> None:
    async with connected_store(url, wait=False) as store:
        index = await open_redis_index(store, writer=True, side_index=True)
        await index.put(ScopeUse(SCOPE, BLOCK_SIZE, 1024), "w1", Tier.HBM, CHAIN, pinned=True)


def test_a_block_is_located_with_its_holders(cli: Cli, fleet_store_url: str) -> None:
    words = ["locate", f"{FIRST:016x}", "--model-id", "m", "--redis-url", fleet_store_url]
    done = cli(*words, "--json")
    assert (done.code, done.err) == (0, "")
    found = [(one["worker"], one["tier"], one["bytes"]) for one in json.loads(done.out)]
    assert found == [("w1", "hbm", 1024), ("w2", "cpu_dram", 1024)]
    table = cli(*words).out
    assert f"2 residencies of block {FIRST:016x} in m/m/-/default" in table and "cpu_dram" in table
    assert json.loads(cli(*words, "--json", "--tenant-id", "other").out) == []


@pytest.mark.parametrize("wrong", ["12", "0x0123456789abcd", "14643705804678351452", "g123456789abcdef"])
def test_a_hash_of_another_form_is_one_clear_line(cli: Cli, fleet_store_url: str, wrong: str) -> None:
    done = cli("locate", wrong, "--model-id", "m", "--redis-url", fleet_store_url)
    assert done.code == 1 and done.out == ""
    assert f"sequence hash {wrong!r}; expected 16 hex digits, as `kvatlas export` prints them" in done.err


def test_children_follow_a_block_or_are_first_blocks(cli: Cli, side_store: str) -> None:
    words = ["children", "--model-id", "m", "--json", "--redis-url", side_store]
    [root] = json.loads(cli(*words).out)
    assert (root["sequence_hash"], root["pinned"], root["age_ms"]) == (f"{FIRST:016x}", True, None)
    [child] = json.loads(cli(*words, f"{FIRST:016x}").out)
    assert child["sequence_hash"] == f"{SECOND:016x}"
    table = cli("children", f"{FIRST:016x}", "--model-id", "m", "--redis-url", side_store).out
    assert f"1 residency of blocks that follow {FIRST:016x}" in table and "pinned" in table and "never" in table


def test_without_a_side_index_one_line_says_what_is_needed(cli: Cli, fleet_store_url: str) -> None:
    done = cli("children", f"{FIRST:016x}", "--model-id", "m", "--redis-url", fleet_store_url)
    assert done.code == 1 and done.err.count("\n") == 1
    assert "no side index" in done.err and "--side-index" in done.err
