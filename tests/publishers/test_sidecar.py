"""Real engine bytes over real ZMQ, through the sidecar, into a real stream."""

import random
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgpack
import pytest
import zmq.asyncio
from nats.aio.client import Client

from kvatlas.bus import StreamSettings, connect_nats, ensure_stream
from kvatlas.embedded import nats_server
from kvatlas.errors import SettingsError, Unreachable
from kvatlas.events import EngineBatch
from kvatlas.fleet import EngineKind, EngineState, Heartbeat
from kvatlas.settings import PublishSettings
from kvatlas.subjects import alive_subject
from publishers.continuity import Continuity
from publishers.counters import PublisherCounters
from publishers.dead_letter import DeadLetters
from publishers.engines import decode_batch
from publishers.feed import BATCHES_AT_ONCE, Feed, FeedSettings
from publishers.ledger import Ledger, LedgerSettings
from publishers.mistrust import BURST
from publishers.publisher import Publisher
from publishers.sidecar import run_sidecar
from tests.publishers.engine_http import engine_http
from tests.publishers.fake_engine import FakeEngine, recording
from tests.publishers.told import read_stream
from tests.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client(fresh_nats: str) -> AsyncIterator[Client]:
    client = await connect_nats(fresh_nats, name="test")
    await ensure_stream(client, StreamSettings(storage="memory"))
    yield client
    await client.close()


def settings(fake: FakeEngine, nats_url: str, **fields: Any) -> PublishSettings:
    return PublishSettings(
        **{
            "engine": EngineKind.VLLM,
            "endpoint": fake.endpoint,
            "replay_endpoint": fake.replay_endpoint,
            "worker_id": "w",
            "model_id": "model",
            "nats_url": nats_url,
            **fields,
        }
    )


@asynccontextmanager
async def sidecar(fake: FakeEngine, nats_url: str, **fields: Any) -> AsyncIterator[Publisher]:
    """A sidecar whose feed is subscribed to the engine."""
    async with anyio.create_task_group() as tasks:
        started: list[Publisher] = []
        tasks.start_soon(run_sidecar, settings(fake, nats_url, **fields), started.extend)
        await until(lambda: started, what="the sidecar is ready")
        await fake.subscribed()
        yield started[0]
        tasks.cancel_scope.cancel()


def folded(kind: EngineKind, payloads: list[bytes], **fields: Any) -> Ledger:
    """What a publisher that saw all of it announces."""
    ledger = Ledger(LedgerSettings("model", "model", **fields))
    for payload in payloads:
        ledger.fold(decode_batch(kind, payload))
    return ledger


async def told_equals(client: Client, publisher: Publisher, ledger: Ledger) -> None:
    with anyio.fail_after(20):
        await until(lambda: publisher.ledger.digest == ledger.digest, what="all batches folded")
        await publisher.flush()
    told = await read_stream(client)
    assert await told.index.digest(publisher.worker_id) == ledger.digest.words
    assert told.outcomes["failed_checks"] == 0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("vllm-0.11.1-array", EngineKind.VLLM),
        ("vllm-0.22.0-array", EngineKind.VLLM),
        ("vllm-0.33.0", EngineKind.VLLM),
        ("vllm-0.33.0-bytes", EngineKind.VLLM),
        ("vllm-0.33.0-hybrid", EngineKind.VLLM),
        ("sglang-0.5.23", EngineKind.SGLANG),
        ("sglang-0.5.23-host", EngineKind.SGLANG),
    ],
)
async def test_a_recording_ends_in_what_the_engine_held(
    client: Client, nats_url: str, name: str, kind: EngineKind
) -> None:
    head, payloads = recording(name)
    async with FakeEngine() as engine, sidecar(engine, nats_url, engine=kind) as publisher:
        await engine.send(*payloads)
        ledger = folded(kind, payloads)
        await told_equals(client, publisher, ledger)
        assert ledger.digest.blocks >= len(head["expected_usable"]) > 0
        assert publisher.counters.engine_batches == len(payloads)


async def test_lost_batches_are_filled_from_replay(client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine(topic=b"kv") as engine, sidecar(engine, nats_url, topic="kv") as publisher:
        await engine.send(*payloads[:50])
        await until(lambda: publisher.counters.engine_batches == 50, what="those before the gap are taken")
        for payload in payloads[50:60]:
            engine.lose(payload)
        await engine.send(*payloads[60:])
        await told_equals(client, publisher, folded(EngineKind.VLLM, payloads))
        assert publisher.counters.feed_gaps == publisher.counters.feed_gaps_filled == 1
        assert publisher.counters.snapshots == 1


async def test_replay_of_older_engines_has_no_topic_frame(client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.11.1-array")
    async with FakeEngine(replay_topic=False) as engine, sidecar(engine, nats_url) as publisher:
        await engine.send(*payloads[:20])
        await until(lambda: publisher.counters.engine_batches == 20, what="those before the gap are taken")
        engine.lose(payloads[20])
        await engine.send(*payloads[21:])
        await told_equals(client, publisher, folded(EngineKind.VLLM, payloads))
        assert publisher.counters.feed_gaps_filled == 1


async def test_a_lost_last_batch_is_seen_when_the_feed_is_silent(client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine() as engine, sidecar(engine, nats_url) as publisher:
        await engine.send(*payloads[:-1])
        engine.lose(payloads[-1])
        await told_equals(client, publisher, folded(EngineKind.VLLM, payloads))
        assert publisher.counters.feed_gaps == 0


async def test_a_sidecar_that_starts_late_asks_for_what_was_before(client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine() as engine:
        await engine.send(*payloads[:100])
        async with sidecar(engine, nats_url) as publisher:
            await engine.send(*payloads[100:])
            await told_equals(client, publisher, folded(EngineKind.VLLM, payloads))


async def test_a_gap_that_cannot_be_filled_starts_over_empty(client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine() as engine, sidecar(engine, nats_url, replay_endpoint=None) as publisher:
        await engine.send(*payloads[:50])
        engine.lose(payloads[50])
        await engine.send(*payloads[51:])
        await told_equals(client, publisher, folded(EngineKind.VLLM, payloads[51:]))
        assert publisher.counters.feed_started_over == 1
        assert publisher.counters.snapshots == 2


async def test_a_restarted_engine_is_told_anew(client: Client, nats_url: str) -> None:
    _, first = recording("vllm-0.33.0")
    _, second = recording("vllm-0.22.0-array")
    async with FakeEngine() as engine, sidecar(engine, nats_url) as publisher:
        await engine.send(*first)
        await until(lambda: publisher.counters.engine_batches == len(first), what="the first life is taken")
        before = publisher.telling.outbox.incarnation
        engine.restart()
        await engine.send(*second)
        await told_equals(client, publisher, folded(EngineKind.VLLM, second))
        assert publisher.counters.feed_restarts >= 1
        assert publisher.telling.outbox.incarnation > before


@pytest.mark.parametrize("distrusted", [False, True])
async def test_bad_payloads_are_counted_and_kept_and_never_stop_the_feed(
    client: Client, nats_url: str, tmp_path: Path, distrusted: bool
) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with (
        FakeEngine() as engine,
        sidecar(engine, nats_url, state_dir=tmp_path, distrust_poison=distrusted) as publisher,
    ):
        await engine.send(*payloads[:40])
        await engine.raw(b"", engine.next_seq.to_bytes(8, "big"), b"\xc1garbage")  # a foreign sender takes our next seq
        await engine.raw(b"", engine.next_seq.to_bytes(8, "big"), payloads[40][:30])
        await engine.send(*payloads[40:80])
        await engine.raw(b"", b"short", payloads[0])
        await engine.raw(b"alone")
        await engine.raw(b"", b"\xff" * 8, payloads[0])  # the seq of a replay's end
        await engine.send(b"\x00" * 10_000_000)  # the engine's own, too large
        await engine.send(*payloads[80:90])
        await engine.send(b"\x92\x01\xc1")  # the engine's own, malformed
        await engine.send(*payloads[90:])
        # either of the engine's own may have taken blocks away: then what was held before the last of them is not claimed
        await told_equals(client, publisher, folded(EngineKind.VLLM, payloads[90:] if distrusted else payloads))
        assert publisher.counters.poison == 7
        assert publisher.counters.poison_malformed == 3
        assert publisher.counters.poison_oversized == 1
        assert publisher.counters.poison_frames == 3
        assert publisher.counters.feed_started_over == 0
        assert publisher.counters.feed_lost == 2
        assert (publisher.counters.snapshots > 1) is distrusted
    letters = (tmp_path / "w.dead-letters.jsonl").read_text().splitlines()
    assert len(letters) == 7


async def test_poison_without_end_is_no_storm_of_incarnations_and_claims_nothing(
    client: Client, nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine() as engine, sidecar(engine, nats_url, distrust_poison=True) as publisher:
        await engine.send(*payloads[:40])
        for at in range(60):
            await engine.send(payloads[40 + at], b"\xc1 no. %d" % at)
        await engine.send(payloads[100])
        await until(lambda: publisher.counters.feed_unheard >= 50, what="the feed is not listened to any more")
        await publisher.flush()
        assert publisher.counters.snapshots <= 1 + BURST
        assert publisher.ledger.digest.blocks == 0
        assert sum((await (await read_stream(client)).index.digest("w") or [1])[::3]) == 0
    assert sum("is not listened to" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("distrusted", [False, True])
async def test_an_event_of_an_unknown_kind_may_have_taken_blocks_away(
    client: Client, nats_url: str, distrusted: bool
) -> None:
    _, payloads = recording("vllm-0.33.0")
    strange = msgpack.packb([1.0, [{"type": "BlocksMoved", "from": "GPU"}], 0])
    async with FakeEngine() as engine, sidecar(engine, nats_url, distrust_poison=distrusted) as publisher:
        await engine.send(*payloads[:40], strange, *payloads[40:])
        await told_equals(client, publisher, folded(EngineKind.VLLM, payloads[40:] if distrusted else payloads))
        assert (publisher.counters.feed_lost, publisher.counters.skipped_events) == (1, 1)


async def test_a_restarted_sidecar_resumes_from_its_saved_state(client: Client, nats_url: str, tmp_path: Path) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine(buffer=60) as engine:
        async with sidecar(engine, nats_url, state_dir=tmp_path) as publisher:
            await engine.send(*payloads[:150])
            await until(lambda: publisher.counters.engine_batches == 150, what="the first part is taken")
            before = publisher.telling.outbox.incarnation
        for payload in payloads[150:]:
            engine.lose(payload)
        async with sidecar(engine, nats_url, state_dir=tmp_path) as publisher:
            await told_equals(client, publisher, folded(EngineKind.VLLM, payloads))
            assert publisher.telling.outbox.incarnation > before
            assert publisher.counters.feed_started_over == 0


async def test_the_saved_state_of_another_life_is_not_used(client: Client, nats_url: str, tmp_path: Path) -> None:
    _, first = recording("vllm-0.33.0")
    _, second = recording("vllm-0.22.0-array")
    async with FakeEngine() as engine:
        async with sidecar(engine, nats_url, state_dir=tmp_path) as publisher:
            await engine.send(*first[:100])
            await until(lambda: publisher.counters.engine_batches == 100, what="the first life is taken")
        engine.restart()
        for payload in second:
            engine.lose(payload)
        async with sidecar(engine, nats_url, state_dir=tmp_path) as publisher:
            await told_equals(client, publisher, folded(EngineKind.VLLM, second))


async def test_one_process_serves_several_ranks(client: Client, nats_url: str) -> None:
    _, first = recording("vllm-0.33.0")
    _, second = recording("sglang-0.5.23")
    async with FakeEngine() as one, FakeEngine() as two, anyio.create_task_group() as tasks:
        started: list[Publisher] = []
        both = [
            settings(one, nats_url, worker_id="a"),
            settings(two, nats_url, worker_id="b", engine=EngineKind.SGLANG),
        ]
        tasks.start_soon(run_sidecar, both, started.extend)
        await until(lambda: started, what="the sidecar is ready")
        await one.subscribed()
        await two.subscribed()
        await one.send(*first)
        await two.send(*second)
        by_name = {publisher.worker_id: publisher for publisher in started}
        await told_equals(client, by_name["a"], folded(EngineKind.VLLM, first))
        await told_equals(client, by_name["b"], folded(EngineKind.SGLANG, second))
        tasks.cancel_scope.cancel()


async def test_everything_arrives_through_losses_restarts_of_nats_and_of_the_sidecar(tmp_path: Path) -> None:
    _, payloads = recording("vllm-0.33.0")
    rng = random.Random(7)
    async with nats_server(data_dir=tmp_path / "nats") as server, FakeEngine() as engine:
        client = await connect_nats(server.url, name="test")
        await ensure_stream(client, StreamSettings())
        for life in range(3):
            async with sidecar(engine, server.url, state_dir=tmp_path) as publisher:
                until_batch = (life + 1) * len(payloads) // 3
                while engine.next_seq < until_batch:
                    payload = payloads[engine.next_seq]
                    if rng.random() < 0.2:
                        engine.lose(payload)
                    else:
                        await engine.send(payload)
                    if rng.random() < 0.03:
                        await server.kill()
                        await server.start()
                if life == 2:
                    await until(lambda: client.is_connected, what="the test is connected again")
                    await told_equals(client, publisher, folded(EngineKind.VLLM, payloads))
                    assert publisher.counters.feed_started_over == 0
        await client.close()


async def test_an_engine_that_connects_to_us(client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with FakeEngine() as engine, anyio.create_task_group() as tasks:
        started: list[Publisher] = []
        one = settings(engine, nats_url, bind=True, endpoint=f"tcp://127.0.0.1:{port}")
        tasks.start_soon(run_sidecar, one, started.extend)
        await until(lambda: started, what="the sidecar is ready")
        assert started[0].engine_state is EngineState.DOWN
        engine.connect(f"tcp://127.0.0.1:{port}")
        await engine.subscribed()
        await engine.send(*payloads)
        await told_equals(client, started[0], folded(EngineKind.VLLM, payloads))
        assert started[0].engine_state.value == "up"
        tasks.cancel_scope.cancel()


async def test_a_rank_is_a_worker_of_its_own_on_ports_counted_up(client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine() as engine:
        ports = [int(endpoint.rpartition(":")[2]) - 3 for endpoint in (engine.endpoint, engine.replay_endpoint)]
        base = {
            "endpoint": f"tcp://127.0.0.1:{ports[0]}",
            "replay_endpoint": f"tcp://127.0.0.1:{ports[1]}",
            "dp_rank": 3,
        }
        async with sidecar(engine, nats_url, **base) as publisher:
            await engine.send(*payloads)
            await told_equals(client, publisher, folded(EngineKind.VLLM, payloads))
            assert publisher.worker_id == "w-dp3"


def test_all_ranks_of_an_engine_are_served_as_one_each(nats_url: str) -> None:
    flags = {
        "engine": "vllm",
        "endpoint": "tcp://127.0.0.1:5557",
        "worker_id": "w",
        "model_id": "m",
        "nats_url": nats_url,
    }
    together = PublishSettings.load(**flags, dp_size=3)
    assert together.ranks == [PublishSettings.load(**flags, dp_rank=rank) for rank in range(3)]
    alone = PublishSettings.load(**flags)
    assert alone.ranks == [alone]
    with pytest.raises(SettingsError, match="expected one rank, or how many there are"):
        PublishSettings.load(**flags, dp_rank=0, dp_size=2)


async def test_an_engine_that_goes_away_is_down_and_its_blocks_stay_told(
    client: Client, nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, payloads = recording("vllm-0.33.0")
    alive = await client.subscribe(alive_subject("w"))

    async def state() -> EngineState:
        return Heartbeat.unpack((await alive.next_msg(timeout=5)).data).state

    async with anyio.create_task_group() as tasks:
        started: list[Publisher] = []
        async with FakeEngine() as engine:
            tasks.start_soon(run_sidecar, settings(engine, nats_url), started.extend)
            await until(lambda: started, what="the sidecar is ready")
            await engine.subscribed()
            await engine.send(*payloads)
            await told_equals(client, started[0], folded(EngineKind.VLLM, payloads))
            await until(lambda: _is(state, EngineState.UP), what="a heartbeat that says up")
        await until(lambda: _is(state, EngineState.DOWN), what="a heartbeat that says down")
        await until(lambda: any("is not connected" in line for line in caplog.messages), what="a line that says why")
        assert started[0].ledger.digest == folded(EngineKind.VLLM, payloads).digest
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def sidecar_over_lives(
    fields: dict[str, Any], nats_url: str
) -> AsyncIterator[Callable[[], Awaitable[Publisher]]]:
    """A sidecar that outlives its engine: what is given starts it, with the settings `fields`."""
    async with anyio.create_task_group() as tasks:

        async def start() -> Publisher:
            started: list[Publisher] = []
            tasks.start_soon(
                run_sidecar,
                PublishSettings(worker_id="w", model_id="model", nats_url=nats_url, **fields),
                started.extend,
            )
            await until(lambda: started, what="the sidecar is ready")
            return started[0]

        yield start
        tasks.cancel_scope.cancel()


async def test_another_life_whose_seq_follows_ours_is_seen_although_the_engine_is_never_silent(
    client: Client, nats_url: str
) -> None:
    _, first = recording("vllm-0.33.0")
    _, second = recording("vllm-0.22.0-array")
    fields: dict[str, Any] = {"engine": EngineKind.VLLM}
    async with sidecar_over_lives(fields, nats_url) as start:
        async with FakeEngine() as engine:
            fields |= {"endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint}
            publisher = await start()
            await engine.subscribed()
            await engine.send(*first[:40])
            await until(lambda: publisher.counters.engine_batches == 40, what="the first life is taken")
        async with FakeEngine(ports=engine.ports) as engine:
            for payload in second[:40]:
                engine.lose(payload)
            await engine.subscribed()
            told = second[:40]

            async def told_anew() -> bool:
                payload = second[min(len(told), len(second) - 1)]  # never silent: then it would be asked, and found out
                await engine.send(payload)
                told.append(payload)
                return publisher.counters.feed_restarts == 1

            await until(told_anew, what="the other life is seen")
            left = second[len(told) :]
            await engine.send(*left)
            await told_equals(client, publisher, folded(EngineKind.VLLM, told + left))


async def test_without_replay_a_lost_connection_gives_up_what_was_held(client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    fields: dict[str, Any] = {"engine": EngineKind.VLLM}
    async with sidecar_over_lives(fields, nats_url) as start:
        async with FakeEngine() as engine:
            fields |= {"endpoint": engine.endpoint}
            publisher = await start()
            await engine.subscribed()
            await engine.send(*payloads)
            await told_equals(client, publisher, folded(EngineKind.VLLM, payloads))
        async with FakeEngine(ports=engine.ports):  # another process, which says nothing
            await until(lambda: not publisher.ledger.digest.blocks, what="nothing is claimed")


@contextmanager
def open_feed(
    engine: FakeEngine, on_batch: Callable[[EngineBatch], object], on_empty: Callable[[], None] = lambda: None
) -> Iterator[Feed]:
    """A feed alone, impatient."""
    where = FeedSettings(
        EngineKind.VLLM, engine.endpoint, engine.replay_endpoint, first_silence_s=0.05, replay_silence_s=0.05
    )
    context = zmq.asyncio.Context()
    letters = DeadLetters(None, "w")
    feed = Feed(where, "w", Continuity(), PublisherCounters(), letters, context, on_batch=on_batch, on_empty=on_empty)
    feed.open()
    try:
        yield feed
    finally:
        feed.close()
        context.destroy(linger=0)


async def test_while_messages_wait_the_others_have_their_turn() -> None:
    """Else what was taken is never folded, and heartbeats and acknowledgements wait."""
    _, payloads = recording("vllm-0.33.0")
    turns = 0
    taken_in: list[int] = []

    async def take_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await anyio.lowlevel.checkpoint()

    async with FakeEngine() as engine:
        with open_feed(engine, lambda _: taken_in.append(turns)) as feed:
            await engine.subscribed()
            await engine.send(*payloads * 4)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(take_turns)
                tasks.start_soon(feed.run)
                await until(lambda: len(taken_in) == 4 * len(payloads), what="all batches taken")
                tasks.cancel_scope.cancel()
    assert max(Counter(taken_in).values()) <= BATCHES_AT_ONCE


async def test_a_feed_that_stays_away_while_the_engine_is_up_gives_up_what_was_held() -> None:
    _, payloads = recording("vllm-0.33.0")
    ledger = Ledger(LedgerSettings("model", "model"))
    async with anyio.create_task_group() as tasks, AsyncExitStack() as opened:
        async with FakeEngine() as engine:
            feed = opened.enter_context(open_feed(engine, ledger.fold, ledger.empty))
            tasks.start_soon(feed.run)
            await engine.subscribed()
            await engine.send(*payloads)
            await until(lambda: ledger.digest == folded(EngineKind.VLLM, payloads).digest, what="all batches folded")
        assert ledger.announced_blocks
        feed.engine_up = lambda: True
        await until(lambda: not ledger.announced_blocks, what="nothing is claimed")
        tasks.cancel_scope.cancel()


async def _is(state: Callable[[], Awaitable[EngineState]], wanted: EngineState) -> bool:
    return await state() is wanted


async def test_another_process_start_time_is_a_restart_of_the_feed(client: Client, nats_url: str) -> None:
    _, first = recording("vllm-0.33.0")
    _, second = recording("vllm-0.22.0-array")
    with engine_http() as http:
        http.pages = {"/health": (200, ""), "/metrics": (200, "process_start_time_seconds 1000.5\n")}
        async with FakeEngine() as engine, sidecar(engine, nats_url, engine_url=http.url) as publisher:
            assert publisher.engine_state is EngineState.UP
            await engine.send(*first[:100])
            await until(lambda: publisher.counters.engine_batches == 100, what="the first life is taken")
            engine.restart()
            for payload in second:  # the new life goes unheard: its start time tells of it
                engine.lose(payload)
            http.pages["/metrics"] = (200, "process_start_time_seconds 2000.5\n")
            await told_equals(client, publisher, folded(EngineKind.VLLM, second))
            assert publisher.counters.feed_restarts >= 1


async def test_a_saved_state_of_another_process_is_not_used(client: Client, nats_url: str, tmp_path: Path) -> None:
    _, payloads = recording("vllm-0.33.0")
    with engine_http() as http:
        http.pages = {"/health": (200, ""), "/metrics": (200, "process_start_time_seconds 1000.5\n")}
        async with FakeEngine() as engine:
            fields = {"engine_url": http.url, "state_dir": tmp_path, "replay_endpoint": engine.replay_endpoint}
            async with sidecar(engine, nats_url, **fields) as publisher:
                await engine.send(*payloads)
                await told_equals(client, publisher, folded(EngineKind.VLLM, payloads))
            engine.restart()
            http.pages["/metrics"] = (200, "process_start_time_seconds 2000.5\n")
            async with sidecar(engine, nats_url, **fields) as publisher:
                await until(lambda: publisher.telling.outbox.acked_seq >= 0, what="the new incarnation is told")
                assert publisher.ledger.digest.blocks == 0


async def test_mistakes_are_one_clear_line(nats_url: str) -> None:
    async with FakeEngine() as engine:
        with pytest.raises(SettingsError, match="each once"):
            await run_sidecar([settings(engine, nats_url), settings(engine, nats_url)])
        with pytest.raises(SettingsError, match="at least one"):
            await run_sidecar([])
        with pytest.raises(Unreachable, match=re.escape(engine.endpoint)):
            await run_sidecar(settings(engine, nats_url, bind=True))
        with pytest.raises(Unreachable, match=r"nats://127\.0\.0\.1:1"):
            await run_sidecar(settings(engine, "nats://127.0.0.1:1", wait=False))
