"""A block is found by its sequence hash, its key and an engine's own hash, on the command line and over HTTP."""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from kvatlas.blocks.external_chain import external_chain
from kvatlas.blocks.hashing import extend_chain, unpack_hashes
from kvatlas.embedded.free_port import free_port
from tests.eventually import until_sync
from tests.http_client import trusted
from tests.kvatlas_cli.conftest import Cli
from tests.kvatlas_cli.test_whole_path import running

TOKENS = list(range(1, 13))
FIRST, SECOND, THIRD = (f"{value:016x}" for value in unpack_hashes(extend_chain(TOKENS, 4)))
EXTERNAL = [f"{value:016x}" for value in unpack_hashes(external_chain(["intro", "chapter"]))]
EVENTS = {
    "w1": [{"type": "block_stored", "block_hashes": ["aa", -2, "9" * 64], "block_size": 4, "token_ids": TOKENS}],
    "w2": [{"type": "block_stored", "block_hashes": ["intro", "chapter"], "block_size": 4}],
}


@dataclass
class Fleet:
    """A running `kvatlas up` and two publishers."""

    cli: Cli
    servers: list[str]
    page: httpx.Client

    def ask(self, command: str, *words: str) -> list[str]:
        """(worker, hash) of each block in a command's answer, as text."""
        done = self.cli(command, *words, "--model-id", "m", "--json", *self.servers)
        assert (done.code, done.err) == (0, ""), done.err
        return [f"{one['worker']} {one['sequence_hash']}" for one in json.loads(done.out)]

    def get(self, path: str, **query: str) -> list[str]:
        """The same over HTTP."""
        answer = self.page.get(path, params={"model_id": "m", **query})
        assert answer.status_code == 200, answer.text
        return [f"{one['worker']} {one['sequence_hash']}" for one in answer.json()]


@pytest.fixture
def fleet(cli: Cli) -> Iterator[Fleet]:
    page, publisher = free_port(), free_port()
    with running("up", "--json", "--side-index", "--status-port", str(page)) as up:
        assert up.stdout is not None
        printed = json.loads(up.stdout.readline())
        nats = ["--nats-url", printed["nats_url"]]
        words = ["--engine", "open", "--model-id", "m", *nats]
        with (
            running("publish", *words, "--worker-id", "w1", "--status-port", str(publisher)),
            running("publish", *words, "--worker-id", "w2", "--status-port", str(publisher + 1)),
            httpx.Client(base_url=f"http://127.0.0.1:{page}", trust_env=False, timeout=30) as client,
        ):
            for port, (engine_id, events) in zip((publisher, publisher + 1), EVENTS.items(), strict=True):
                url, batch = f"http://127.0.0.1:{port}/events", {"engine_id": engine_id, "events": events}

                def posted(url: str = url, batch: object = batch) -> bool:
                    try:
                        return httpx.post(url, json=batch, trust_env=False, verify=trusted()).status_code == 200
                    except httpx.TransportError:
                        return False

                until_sync(posted, what="the publisher takes events")
            made = Fleet(cli, [*nats, "--redis-url", printed["redis_url"]], client)
            chain = "external:default"
            until_sync(lambda: made.get("/blocks", hash=THIRD), what="the blocks are in the index")
            until_sync(lambda: made.get("/blocks", hash=EXTERNAL[1], chain=chain), what="the other worker's too")
            until_sync(lambda: len(json.loads(cli("workers", "--json", *made.servers[2:]).out)) == 2, what="both beat")
            yield made


def test_a_block_is_found_followed_and_removed_by_any_of_its_names(fleet: Fleet) -> None:
    second, third = f"w1 {SECOND}", f"w1 {THIRD}"
    hashes = ("-2", "18446744073709551614", "fffffffffffffffe")
    for names in ({"hash": SECOND}, {"hash": SECOND, "prefix": FIRST}, *({"engine_hash": one} for one in hashes)):
        assert fleet.get("/blocks", **names) == [second]
        assert fleet.get("/blocks/children", **names) == [third]
    assert fleet.get("/blocks/children") == [f"w1 {FIRST}"]
    for names, found in (
        ({"hash": SECOND, "prefix": THIRD}, []),
        ({"hash": FIRST, "prefix": "root"}, [f"w1 {FIRST}"]),
        ({"engine_hash": "9" * 64}, [third]),
        ({"engine_hash": "unheard"}, []),
        ({"hash": "chapter", "prefix": "intro", "chain": "external:default"}, [f"w2 {EXTERNAL[1]}"]),
        ({"hash": "intro", "prefix": "root", "chain": "external:default"}, [f"w2 {EXTERNAL[0]}"]),
        ({"hash": "chapter", "prefix": "other", "chain": "external:default"}, []),
    ):
        assert fleet.get("/blocks", **names) == found
    assert fleet.ask("locate", SECOND, "--prefix", FIRST) == fleet.ask("locate", "--engine-hash", "-2") == [second]
    assert fleet.ask("children", "--engine-hash", "aa") == [second]

    for query, line in (
        ({"hash": "12"}, "expected 16 hex digits"),
        ({}, "no block is named"),
        ({"hash": FIRST, "engine_hash": "aa"}, "expected one of the two"),
        ({"hahs": FIRST}, "'hahs' is not known"),
        ({"model_id": "", "hash": FIRST}, "model_id is missing"),
    ):
        answer = fleet.page.get("/blocks", params={"model_id": "m", **query})
        assert answer.status_code == 400 and line in answer.json()["error"]

    gone = fleet.page.post("/blocks/remove", params={"model_id": "m", "worker": "w1", "engine_hash": "9" * 64})
    assert gone.json() == {"worker": "w1", "removed": 1}
    until_sync(lambda: not fleet.get("/blocks", hash=THIRD), what="the last block is gone")
    done = fleet.cli("remove", SECOND, "--prefix", FIRST, "--worker", "w1", "--model-id", "m", *fleet.servers)
    assert (done.code, done.err.strip()) == (0, "kvatlas: removed 1 residency of worker w1")
    until_sync(lambda: not fleet.get("/blocks", hash=SECOND), what="the block before it too")
    assert fleet.get("/blocks", hash=FIRST) == [f"w1 {FIRST}"]
    audit = fleet.cli("audit", "--json", *fleet.servers)  # the publisher's account and the index still agree
    assert audit.code == 0, audit.out
    none = fleet.cli("remove", "--engine-hash", "aa", "--worker", "w9", "--model-id", "m", *fleet.servers)
    assert none.code == 1 and "no worker 'w9'" in none.err
