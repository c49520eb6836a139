"""Batches of the open event forms: their engine, their order, their loads, and the engine's shutdown."""

import json
import logging
import re
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgpack
import pytest
from nats.aio.client import Client

from kvatlas.blocks.external_chain import external_chain
from kvatlas.blocks.hashing import extend_chain, local_hash, unpack_hashes
from kvatlas.errors import EngineEventError
from kvatlas.fleet.records import EngineKind, EngineState
from kvatlas_publishers.control_requests.control import digests_by_scope
from kvatlas_publishers.feed.open_batches import OpenBatches
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.settings import PublisherSettings
from tests.eventually import until
from tests.publishers.fake_engine import FakeEngine
from tests.publishers.published_stream import read_stream
from tests.publishers.sidecars import sidecar

pytestmark = pytest.mark.anyio

TOKENS = list(range(1, 17))
LOCAL = [local_hash(TOKENS[at : at + 4]) for at in range(0, 16, 4)]
MOST = (1 << 64) - 1

MakePublisher = Callable[..., Awaitable[Publisher]]


@pytest.fixture
async def publisher(nats_client: Client) -> AsyncIterator[MakePublisher]:
    """Makes publishers that publish nothing; tests look at their ledgers."""
    async with AsyncExitStack() as stack:

        async def make(**fields: Any) -> Publisher:
            settings = {"worker_id": "w", "model_id": "m", "engine": EngineKind.OPEN, "block_size": 4, **fields}
            made = Publisher(PublisherSettings(**settings), nats=nats_client, begin=False)
            return await stack.enter_async_context(made)

        yield make


def announced(one: Publisher) -> set[int]:
    one.settle()
    return {value for _, _, _, value in one.ledger.announced()}


def stored(event_id: int, *blocks: tuple[int, int], parent: int | None = None) -> dict[str, Any]:
    listed = [{"block_hash": name, "tokens_hash": local} for name, local in blocks]
    return {"event_id": event_id, "data": {"stored": {"parent_hash": parent, "blocks": listed}}}


def batch(*events: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"engine_id": "e", "events": list(events), **fields}


def block(*names: int | str, **fields: Any) -> dict[str, Any]:
    return {"type": "block_stored", "block_hashes": list(names), "block_size": 4, **fields}


async def test_local_hashes_key_blocks_as_their_tokens_do_with_hashes_up_to_64_bits(publisher: MakePublisher) -> None:
    one = await publisher()
    batches = OpenBatches(one)
    batches.take({"events": [stored(0, (MOST, LOCAL[0]), (1 << 63, LOCAL[1] - (1 << 64)))], "shutdown": False})
    batches.take({"events": [stored(1, (7, LOCAL[2]), parent=-1 << 63)], "shutdown": False})
    assert announced(one) == set(unpack_hashes(extend_chain(TOKENS[:12], 4)))
    batches.take({"events": [{"event_id": MOST, "data": {"removed": {"block_hashes": [-1]}}}], "shutdown": False})
    assert (announced(one), one.counters.event_gaps) == (set(), 1)


async def test_a_gap_in_the_event_ids_drops_what_was_held_and_a_duplicate_changes_nothing(
    publisher: MakePublisher,
) -> None:
    one = await publisher()
    batches = OpenBatches(one)
    first = {"events": [stored(5, (1, LOCAL[0]))], "shutdown": False}
    second = {"events": [stored(6, (2, LOCAL[1]), parent=1)], "shutdown": False}
    for each in (first, second, first, second):
        batches.take(each)
    assert (len(announced(one)), one.counters.event_duplicates) == (2, 2)
    batches.take({"events": [stored(8, (3, LOCAL[2]), parent=2), stored(9, (4, LOCAL[3]))], "shutdown": False})
    assert announced(one) == {LOCAL[3]}
    assert (one.counters.event_gaps, one.counters.event_restarts) == (1, 0)
    batches.take({"events": [stored(5, (9, LOCAL[0]))], "shutdown": False})
    assert announced(one) == {LOCAL[0]}
    assert one.counters.event_restarts == 1


async def test_an_event_that_cant_be_read_is_a_gap_unless_it_can_only_store(publisher: MakePublisher) -> None:
    one = await publisher()
    batches = OpenBatches(one)
    batches.take({"events": [stored(0, (1, LOCAL[0]))], "shutdown": False})
    broken = {"event_id": 1, "data": {"stored": {"blocks": 5}}}
    assert len(batches.take({"events": [broken, stored(2, (2, LOCAL[1]))], "shutdown": False}).skipped) == 1
    assert (announced(one), one.counters.event_gaps) == ({LOCAL[0], LOCAL[1]}, 0)
    batches.take({"events": [{"event_id": 3, "data": "moved"}, stored(4, (3, LOCAL[2]))], "shutdown": False})
    assert (announced(one), one.counters.event_gaps, one.counters.feed_lost) == ({LOCAL[2]}, 1, 1)


async def test_a_source_whose_numbers_never_follow_is_ignored_for_a_while_and_nothing_is_held_of_it(
    publisher: MakePublisher,
) -> None:
    one = await publisher()
    batches = OpenBatches(one)
    for at in range(40):  # two engines, each with its own count
        batches.take({"events": [stored(at % 2 * 100 + at, (at, LOCAL[0]))], "shutdown": False})
    assert announced(one) == set()
    assert one.counters.feed_unheard > 20


async def test_shutdown_drains_the_worker_until_its_engine_begins_again(publisher: MakePublisher) -> None:
    one = await publisher()
    batches = OpenBatches(one)
    batches.take({"events": [stored(3, (1, LOCAL[0]))], "shutdown": False})
    assert one.engine.state is EngineState.UP
    batches.take({"events": [], "shutdown": True})
    assert (one.engine.state, announced(one)) == (EngineState.DRAINING, {LOCAL[0]})
    batches.take({"events": [stored(0, (1, LOCAL[1]))], "shutdown": False})
    assert (one.engine.state, announced(one)) == (EngineState.UP, {LOCAL[1]})


async def test_without_a_block_size_local_hashes_are_left_out_and_diagnosed(publisher: MakePublisher) -> None:
    one = await publisher(block_size=None)
    OpenBatches(one).take({"events": [stored(0, (1, LOCAL[0]))], "shutdown": False})
    assert announced(one) == set()
    assert [found.name for found in one.diagnoses.current] == ["block_size_untold"]


async def test_batches_of_another_engine_are_ignored_and_diagnosed(publisher: MakePublisher) -> None:
    one = await publisher()
    batches = OpenBatches(one)
    batches.take(batch(block("a")))
    batches.take({**batch(block("b")), "engine_id": "other"})
    assert announced(one) == set(unpack_hashes(external_chain(["a"])))
    assert (one.counters.feed_unheard, [found.name for found in one.diagnoses.current]) == (1, ["engine_id"])
    named = await publisher(engine_id="other")
    OpenBatches(named).take(batch(block("a")))
    assert (announced(named), named.counters.feed_unheard) == (set(), 1)


async def test_blocks_of_another_model_are_left_out_and_removals_are_not(publisher: MakePublisher) -> None:
    one = await publisher()
    batches = OpenBatches(one)
    batches.take(batch(block("a"), block("b", parent_block_hash="a")))
    removed = {"type": "block_removed", "block_hashes": ["b"]}
    batches.take(batch(block("c"), removed, model_id="n"))
    assert announced(one) == set(unpack_hashes(external_chain(["a"])))
    assert [found.name for found in one.diagnoses.current] == ["model"]


async def test_tenant_adapter_and_bytes_of_a_batch_are_its_blocks(
    publisher: MakePublisher,
) -> None:
    one = await publisher(hash_chain="x")
    batches = OpenBatches(one)
    batches.take(batch(block("a"), tenant_id="default", bytes_per_block=100))
    batches.take(batch(block("a", bytes_per_block=200)))
    batches.take(batch(block("b"), block("c", lora_name="l2"), tenant_id="t", adapter_id="l1"))
    one.settle()
    uses = {str(use.scope): use.block_bytes for use in one.ledger.uses.values()}
    assert uses == {
        "m/m/-/default/external:x": 200,
        "m/m/l1/t/external:x": 0,
        "m/m/l2/t/external:x": 0,
    }
    assert one.ledger.digest.blocks == 3


async def test_a_chain_begins_at_root_or_at_its_session_and_an_unknown_parent_is_left_out(
    publisher: MakePublisher,
) -> None:
    one = await publisher()
    batches = OpenBatches(one)
    batches.take(
        batch(block("a", parent_block_hash="root"), block("b", session_id="s"), block("d", parent_block_hash="?"))
    )
    batches.take(batch(block("c", parent_block_hash="s", session_id="s")))
    roots = [external_chain(["a"]), external_chain(["b"], "s"), external_chain(["c"], "s")]
    assert announced(one) == {key for chain in roots for key in unpack_hashes(chain)}
    assert one.ledger.counters.unknown_parent == 1
    batches.take(batch(block("?", parent_block_hash="a")))
    assert announced(one) >= set(unpack_hashes(external_chain(["a", "?", "d"])))


async def test_an_engine_that_tells_tokens_has_no_external_blocks(publisher: MakePublisher) -> None:
    one = await publisher()
    batches = OpenBatches(one)
    batches.take(batch(block("x")))
    assert announced(one) == set(unpack_hashes(external_chain(["x"])))
    batches.take(batch(block("a", token_ids=TOKENS[:4])))
    assert announced(one) == {LOCAL[0]}
    batches.take(batch(block("a", medium="cpu"), block("y", medium="cpu")))
    assert announced(one) == {LOCAL[0]}
    assert {tier.label for _, tier, _, _ in one.ledger.announced()} == {"hbm", "cpu_dram"}
    batches.take(batch({"type": "block_removed", "block_hashes": ["a"]}))
    assert announced(one) == set()


async def test_a_load_is_told_by_either_name_and_a_wrong_one_is_counted_and_named(
    publisher: MakePublisher, caplog: pytest.LogCaptureFixture
) -> None:
    one = await publisher()
    batches = OpenBatches(one)
    batches.take(batch(load={"request_active_slots": 3, "kv_total_blocks": 9, "requests_waiting": 2}))
    assert one.engine.load is not None
    metrics = one.engine.load.forward_pass
    assert (metrics.active_request_slots, metrics.total_kv_blocks, metrics.requests_waiting) == (3, 9, 2)
    (line,) = batches.take(batch(load={"active_slots": 5})).skipped
    assert line.startswith("load ignored: load field active_slots is not known")
    assert one.engine.load.forward_pass == metrics
    assert (one.counters.load_samples, one.counters.load_failures) == (1, 1)
    assert "load ignored: load field active_slots is not known" in caplog.text


async def test_whoever_sends_a_batch_is_told_what_of_it_is_ignored(publisher: MakePublisher) -> None:
    one = await publisher(block_size=None)
    batches = OpenBatches(one)
    assert batches.take(batch(block("a"))).skipped == []
    (line,) = batches.take({"engine_id": "e2", "events": [block("b")]}).skipped
    assert line == "batches of engine e2 are ignored: the worker is engine e"
    (line,) = batches.take(batch(block("b"), block("c"), model_id="other")).skipped
    assert line == "blocks of model other with tokenizer m are left out: the worker has another model"
    (line,) = batches.take({"events": [stored(0, (1, 1)), stored(1, (2, 2))], "shutdown": False}).skipped
    assert line == "events of the router protocol have no block size: their blocks are left out"
    assert announced(one) == set(unpack_hashes(external_chain(["a"])))


async def test_what_is_no_batch_is_refused_and_changes_nothing(publisher: MakePublisher) -> None:
    one = await publisher()
    batches = OpenBatches(one)
    for wrong in (b"{", b"{}", b'{"events": 1}', b'{"events": []}', b"\x80", b'{"engine_id": 5, "events": []}'):
        with pytest.raises(EngineEventError):
            batches.take(wrong)
    assert one.counters.engine_batches == 0


async def test_batches_over_zmq_json_and_msgpack_are_followed_across_a_restart_of_the_engine(
    nats_client: Client, nats_url: str
) -> None:
    names = {"w": set(unpack_hashes(external_chain(["a", "b"])))}
    async with FakeEngine() as engine, sidecar(engine, nats_url, engine=EngineKind.OPEN, block_size=4) as one:
        await engine.send(
            json.dumps(batch(block("a"))).encode(), msgpack.packb(batch(block("b", parent_block_hash="a")))
        )
        await until(lambda: announced(one) == names["w"], what="both batches are taken")
        scopes = digests_by_scope(one.ledger)
        assert scopes is not None and [each.scope.chain for each in scopes] == ["external:default"]
        await one.flush()
        published = await read_stream(nats_client)
        assert {found.sequence_hash async for found in published.index.snapshot("w")} == names["w"]
        engine.restart()
        await engine.send(json.dumps({**batch(block("c")), "engine_id": "e-2"}).encode())
        restarted = set(unpack_hashes(external_chain(["c"])))
        await until(lambda: announced(one) == restarted, what="the new process is followed")
        assert one.diagnoses.current == ()


async def test_a_parent_that_is_not_known_is_logged_with_the_cure(
    publisher: MakePublisher, caplog: pytest.LogCaptureFixture
) -> None:
    one = await publisher()
    batches = OpenBatches(one)
    with caplog.at_level(logging.INFO, "kvatlas.publisher"):
        batches.take(batch(block("a", "b", parent_block_hash="session-1")))
        one.settle()
        batches.take(batch())
    assert "2 blocks left out: their parent block is unknown; for a session's first block" in caplog.text


async def test_the_documented_program_runs(nats_client: Client, nats_url: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "events.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    body = textwrap.indent(program.replace("nats://127.0.0.1:4222", nats_url), "    ")
    names: dict[str, Any] = {}
    exec(f"async def run():\n{body}    return publisher", names)  # noqa: S102 -- the documentation's own program
    publisher = await names["run"]()
    assert publisher.counters.engine_events == 1 and publisher.changelog.flushed
