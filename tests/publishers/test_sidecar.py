"""Real engine bytes over real ZMQ, through the sidecar, into a real stream."""

import random
import re
import socket
from pathlib import Path

import anyio
import anyio.lowlevel
import msgpack
import pytest
from nats.aio.client import Client

from kvatlas.bus.connection import connect_nats
from kvatlas.bus.stream import StreamSettings, ensure_stream
from kvatlas.embedded import nats_server
from kvatlas.errors import SettingsError, Unreachable
from kvatlas.fleet.records import EngineKind, EngineState
from kvatlas.settings import PublishSettings
from kvatlas_publishers.engines import MAX_PAYLOAD_BYTES
from kvatlas_publishers.feed.undecodable import BURST
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.sidecar import run_sidecar
from tests.eventually import until
from tests.publishers.fake_engine import FakeEngine, recording
from tests.publishers.published_stream import read_stream
from tests.publishers.sidecars import assert_published, ledger_of, settings, sidecar

pytestmark = pytest.mark.anyio


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
    nats_client: Client, nats_url: str, name: str, kind: EngineKind
) -> None:
    head, payloads = recording(name)
    ids = {"1": "adapter-1", "2": "adapter-2"}  # vLLM 0.11 reports no names
    async with FakeEngine() as engine, sidecar(engine, nats_url, engine=kind, adapter_ids=ids) as publisher:
        await engine.send(*payloads)
        ledger = ledger_of(kind, payloads, adapter_ids=ids)
        await assert_published(nats_client, publisher, ledger)
        assert ledger.digest.blocks >= len(head["expected_usable"]) > 0
        assert publisher.counters.engine_batches == len(payloads)


async def test_bad_payloads_are_counted_and_kept_and_never_stop_the_feed(
    nats_client: Client, nats_url: str, tmp_path: Path
) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with (
        FakeEngine() as engine,
        sidecar(engine, nats_url, state_dir=tmp_path) as publisher,
    ):
        await engine.send(*payloads[:40])
        await engine.raw(b"", engine.next_seq.to_bytes(8, "big"), b"\xc1garbage")  # a foreign sender takes our next seq
        await engine.raw(b"", engine.next_seq.to_bytes(8, "big"), payloads[40][:30])
        await engine.send(*payloads[40:80])
        await engine.raw(b"", b"short", payloads[0])
        await engine.raw(b"alone")
        await engine.raw(b"", b"\xff" * 8, payloads[0])  # the seq of a replay's end
        await engine.send(bytes(MAX_PAYLOAD_BYTES + 1))  # the engine's own, too large
        await engine.send(*payloads[80:90])
        await engine.send(b"\x92\x01\xc1")  # the engine's own, malformed
        await engine.send(*payloads[90:])
        # either of the engine's own may have removed blocks, so blocks held before the last of them are not claimed
        await assert_published(nats_client, publisher, ledger_of(EngineKind.VLLM, payloads[90:]))
        assert publisher.counters.poison == 7
        assert publisher.counters.poison_malformed == 3
        assert publisher.counters.poison_oversized == 1
        assert publisher.counters.poison_frames == 3
        assert publisher.counters.feed_started_over == 0
        assert publisher.counters.feed_lost == 2
        assert publisher.counters.snapshots > 1
    letters = (tmp_path / "w.dead-letters.jsonl").read_text().splitlines()
    assert len(letters) == 7


async def test_endless_bad_payloads_cause_few_incarnations_and_no_claims(
    nats_client: Client, nats_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, payloads = recording("vllm-0.33.0")
    async with FakeEngine() as engine, sidecar(engine, nats_url) as publisher:
        await engine.send(*payloads[:40])
        for at in range(60):
            await engine.send(payloads[40 + at], b"\xc1 no. %d" % at)
        await engine.send(payloads[100])
        await until(lambda: publisher.counters.feed_unheard >= 50, what="the feed is ignored")
        await publisher.flush()
        assert publisher.counters.snapshots <= 1 + BURST
        assert publisher.ledger.digest.blocks == 0
        assert sum((await (await read_stream(nats_client)).index.digest("w") or [1])[::3]) == 0
    assert sum("too many were unreadable" in line for line in caplog.messages) == 1


@pytest.mark.parametrize("distrusted", [False, True])
async def test_an_event_of_an_unknown_kind_may_have_removed_blocks(
    nats_client: Client, nats_url: str, distrusted: bool
) -> None:
    _, payloads = recording("vllm-0.33.0")
    strange = msgpack.packb([1.0, [{"type": "BlocksMoved", "from": "GPU"}], 0])
    async with FakeEngine() as engine, sidecar(engine, nats_url, distrust_poison=distrusted) as publisher:
        await engine.send(*payloads[:40], strange, *payloads[40:])
        await assert_published(
            nats_client, publisher, ledger_of(EngineKind.VLLM, payloads[40:] if distrusted else payloads)
        )
        assert (publisher.counters.feed_lost, publisher.counters.skipped_events) == (1, 1)


async def test_one_process_serves_several_ranks(nats_client: Client, nats_url: str) -> None:
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
        await assert_published(nats_client, by_name["a"], ledger_of(EngineKind.VLLM, first))
        await assert_published(nats_client, by_name["b"], ledger_of(EngineKind.SGLANG, second))
        tasks.cancel_scope.cancel()


async def test_everything_arrives_despite_losses_and_restarts_of_nats_and_the_sidecar(tmp_path: Path) -> None:
    _, payloads = recording("vllm-0.33.0")
    rng = random.Random(7)
    async with nats_server(data_dir=tmp_path / "nats") as server, FakeEngine() as engine:
        client = await connect_nats(server.url, name="test")
        await ensure_stream(client, StreamSettings())
        for run in range(3):
            async with sidecar(engine, server.url, state_dir=tmp_path) as publisher:
                until_batch = (run + 1) * len(payloads) // 3
                while engine.next_seq < until_batch:
                    payload = payloads[engine.next_seq]
                    if rng.random() < 0.2:
                        engine.lose(payload)
                    else:
                        await engine.send(payload)
                    if rng.random() < 0.03:
                        await server.kill()
                        await server.start()
                if run == 2:
                    await until(lambda: client.is_connected, what="the test is connected again")
                    await assert_published(client, publisher, ledger_of(EngineKind.VLLM, payloads))
                    assert publisher.counters.feed_started_over == 0
        await client.close()


async def test_an_engine_may_connect_to_a_bound_event_socket(nats_client: Client, nats_url: str) -> None:
    _, payloads = recording("vllm-0.33.0")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    async with FakeEngine() as engine, anyio.create_task_group() as tasks:
        started: list[Publisher] = []
        one = settings(engine, nats_url, bind=True, endpoint=f"tcp://127.0.0.1:{port}")
        tasks.start_soon(run_sidecar, one, started.extend)
        await until(lambda: started, what="the sidecar is ready")
        assert started[0].engine.state is EngineState.DOWN
        engine.connect(f"tcp://127.0.0.1:{port}")
        await engine.subscribed()
        await engine.send(*payloads)
        await assert_published(nats_client, started[0], ledger_of(EngineKind.VLLM, payloads))
        assert started[0].engine.state.value == "up"
        tasks.cancel_scope.cancel()


async def test_a_rank_is_a_worker_of_its_own_on_ports_counted_up(nats_client: Client, nats_url: str) -> None:
    _, of_rank_0 = recording("vllm-0.33.0")
    payloads = [msgpack.packb([*msgpack.unpackb(one, strict_map_key=False)[:2], 3]) for one in of_rank_0]
    async with FakeEngine() as engine:
        ports = [int(endpoint.rpartition(":")[2]) - 3 for endpoint in (engine.endpoint, engine.replay_endpoint)]
        base = {
            "endpoint": f"tcp://127.0.0.1:{ports[0]}",
            "replay_endpoint": f"tcp://127.0.0.1:{ports[1]}",
            "dp_rank": 3,
        }
        async with sidecar(engine, nats_url, **base) as publisher:
            await engine.send(*payloads)
            await assert_published(nats_client, publisher, ledger_of(EngineKind.VLLM, payloads))
            assert publisher.worker_id == "w-dp3"


def test_each_rank_of_an_engine_has_settings_of_its_own(nats_url: str) -> None:
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
    with pytest.raises(SettingsError, match="--dp-rank and --dp-size are both given; set only one of them"):
        PublishSettings.load(**flags, dp_rank=0, dp_size=2)


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
