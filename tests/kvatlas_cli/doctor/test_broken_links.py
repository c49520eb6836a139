"""Each link from an engine's flags to a router's answer is broken on running processes; the doctor names the cause and the
cure.

One fleet has a sidecar for each setting that can be wrong, and two sound ones.
"""

import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
import msgpack
import pytest
from nats.js.api import DiscardPolicy, StreamConfig

from kvatlas.bus.connection import connect_nats
from kvatlas.bus.subjects import ALL_EVENTS, STREAM, events_subject
from kvatlas.embedded import nats_server
from kvatlas.settings import PublishSettings
from kvatlas_cli.doctor import Finding, Level, examine
from kvatlas_publishers.sidecar import run_sidecar
from tests.eventually import until
from tests.kvatlas_cli.doctor.installation import (
    MODEL,
    Installation,
    endpoint,
    now_us,
    run_doctor,
    running_installation,
)
from tests.publishers.fake_engine import FakeEngine
from tests.router.proxy.engines import running_proxy
from tests.simulator.running_engine import running_engine

pytestmark = pytest.mark.anyio

SOUND = "sound-model"
FOR_TENANTS = "tenants-model"
EXTERNAL = {"engine_id": "e", "events": [{"type": "block_stored", "block_hashes": ["a", "b"], "block_size": 4}]}
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Link:
    """One broken link: the worker, the check that finds it, and the finding's text."""

    worker: str
    check: str
    seen: str
    cure: str
    level: Level = Level.ERROR


SETTINGS = "workers.settings"
LINKS = (
    Link("port-alone", SETTINGS, "does not answer: nothing is connected there", "if the engine runs"),
    Link("http-alone", SETTINGS, "the socket there is not an event socket", "set --endpoint to the event socket"),
    Link("topic-replay", SETTINGS, "publishes under topic '', but --topic is 'kv'", "leave --topic out"),
    Link("topic", SETTINGS, "publishes under topic '', but --topic is 'kv'", "leave --topic out"),
    Link("events-off", SETTINGS, "nothing is connected there", "start the engine with --kv-events-config"),
    Link("size", SETTINGS, "blocks have 4 tokens, but --block-size is 8", "set --block-size 4"),
    Link("parts", SETTINGS, "the indexers have 64 partitions, but --partitions is 32", "set --partitions 64"),
    Link("parts", "nats.refused", "(wrong_partition)", "--partitions of the store's layout"),
    Link("replay", SETTINGS, "but replay socket tcp://127.0.0.1:", "set --replay-endpoint"),
    Link("engine-url", SETTINGS, "but the engine does not answer at http://127.0.0.1:", "set --engine-url"),
    Link("not-engine", SETTINGS, "is not a sglang engine: it has no /health (status 404)", "set --engine-url"),
    Link("kind", SETTINGS, "is vllm's, but --engine is sglang", "set --engine vllm"),
    Link("model", "pools.models", f"--model-id is mock-mode, but the engine serves {MODEL}", f"set --model-id {MODEL}"),
    Link("tokenizer", "pools.tokenizers", "(mock-model, other)", "the same --tokenizer-id", Level.WARNING),
    Link(
        "tenant",
        "routers.tenants",
        "requests of tenant default went to workers that publish tenant acme",
        "--tenant-id",
    ),
    Link("chain", "pools.chains", "external:default: chain; own: ", "let all engines report token ids", Level.WARNING),
    Link("clock", "clocks", "clock +90.", "synchronize the clocks"),
    Link("version", "nats.refused", "(version): message version 9", "the same version of kvatlas everywhere"),
    Link("old", "workers.versions", "0.0.1: old", "upgrade indexers first", Level.INFO),
    Link("twin-b", "workers.address", "twin-a, twin-b have the same address, http://twin:80", "--engine-url"),
    Link("elsewhere", "workers.publishers", "but not heard on NATS at nats://127.0.0.1:", "the same --nats-url"),
)


def unused_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@dataclass
class BrokenFleet:
    """`other_nats`: a server with a publisher but no indexer. `page`: that publisher's status page."""

    installation: Installation
    other_nats: str
    page: str
    found: Sequence[Finding] = ()

    async def examine(self) -> Sequence[Finding]:
        servers = self.installation.nats.url, self.installation.valkey.url
        self.found = await examine(*servers, listen_s=1.5, settle_s=0.5, status_urls=[self.page])
        return self.found

    def missing(self) -> list[Link]:
        """Links for which nothing is found."""
        return [link for link in LINKS if not any(_is_of(one, link) for one in self.found)]


def _is_of(found: Finding, link: Link) -> bool:
    named = link.worker in found.line.replace(",", " ").replace(";", " ").replace(":", " ").split()
    told = link.seen in found.line and link.cure in found.advice
    return found.check == link.check and found.level is link.level and told and named


@pytest.fixture(scope="module")
async def fleet() -> AsyncIterator[BrokenFleet]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        installation = await enter(running_installation())
        await enter(installation.replicas("a"))
        proxy = await enter(running_proxy(installation.valkey.url))
        other = await enter(nats_server())
        engine, client = await enter(running_engine())
        silent, _ = await enter(running_engine(events=False))
        of_tenants, _ = await enter(running_engine(model=FOR_TENANTS))
        sound, sound_client = await enter(running_engine(model=SOUND))
        open_engine = await enter(FakeEngine())
        tasks = await enter(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        page = f"http://127.0.0.1:{unused_port()}"

        def start(worker_id: str, **changed: Any) -> None:
            given = {
                "nats_url": installation.nats.url,
                "engine": "vllm",
                "endpoint": engine.endpoint,
                "replay_endpoint": engine.replay_endpoint,
                "worker_id": worker_id,
                "model_id": MODEL,
                "engine_url": engine.base_url,
                "advertise_url": f"http://{worker_id}:80",
                **changed,
            }
            tasks.start_soon(run_sidecar, PublishSettings.load(**given))

        at_http = engine.base_url.replace("http:", "tcp:")
        start("port-alone", endpoint=f"tcp://127.0.0.1:{unused_port()}", replay_endpoint=None, engine_url=None)
        start("http-alone", endpoint=at_http, replay_endpoint=None, engine_url=None)
        start("topic-replay", topic="kv")
        start("topic", topic="kv", replay_endpoint=None)
        start(
            "events-off", endpoint=f"tcp://127.0.0.1:{unused_port()}", engine_url=silent.base_url, replay_endpoint=None
        )
        start("size", block_size=8)
        start("parts", partitions=32)
        start("replay", replay_endpoint=f"tcp://127.0.0.1:{unused_port()}")
        start("engine-url", engine_url=f"http://127.0.0.1:{unused_port()}")
        start("kind", engine="sglang")
        start("model", model_id="mock-mode")
        start("tokenizer", tokenizer_id="other")
        start("chain", engine="open", endpoint=open_engine.endpoint, replay_endpoint=open_engine.replay_endpoint)
        start("twin-a", advertise_url="http://twin:80")
        start("twin-b", advertise_url="http://twin:80")
        start("elsewhere", nats_url=other.url, status_port=int(page.rpartition(":")[2]))
        start("not-engine", engine="sglang", engine_url=page)
        tenants = {"endpoint": of_tenants.endpoint, "replay_endpoint": None, "engine_url": of_tenants.base_url}
        start("tenant", model_id=FOR_TENANTS, tenant_id="acme", advertise_url=None, **tenants)
        rest = {"endpoint": sound.endpoint, "replay_endpoint": sound.replay_endpoint, "engine_url": sound.base_url}
        start("sound-1", model_id=SOUND, **rest)
        start("sound-2", model_id=SOUND, **rest)
        tasks.start_soon(_send_requests, (client, MODEL), (sound_client, SOUND))
        tasks.start_soon(_send_heartbeats, installation)
        await installation.nats_client.publish(
            events_subject("version", 64), msgpack.packb([9, "version", 1, 0, 0, {}, []])
        )
        await open_engine.subscribed()
        await open_engine.send(json.dumps(EXTERNAL).encode())
        broken = BrokenFleet(installation, other.url, page)
        with anyio.move_on_after(DEADLINE_S):
            while broken.missing():
                body = {"model": FOR_TENANTS, "prompt": list(range(41)), "max_tokens": 2}
                await proxy.post("/v1/completions", json=body)  # refused until its worker is known
                await broken.examine()
        yield broken
        tasks.cancel_scope.cancel()


async def _send_requests(*engines: tuple[httpx.AsyncClient, str]) -> None:
    """Each engine keeps computing something new, so that it has events to publish."""
    for first in range(0, 1 << 20, 100):
        for client, model in engines:
            body = {"model": model, "prompt": list(range(first % 30_000, first % 30_000 + 41)), "max_tokens": 2}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        await anyio.sleep(1.0)


async def _send_heartbeats(installation: Installation) -> None:
    """Send heartbeats of a worker whose clock is wrong, and of one with another version."""
    while True:
        await installation.send_heartbeat("clock", endpoint=endpoint("clock"), sent_us=now_us() + 90_500_000)
        await installation.send_heartbeat("old", endpoint=endpoint("old"), version="0.0.1")
        await anyio.sleep(0.5)


@pytest.mark.parametrize("link", LINKS, ids=lambda link: f"{link.worker}: {link.check}")
async def test_a_broken_link_is_named_with_its_cure(fleet: BrokenFleet, link: Link) -> None:
    of_check = [f"{one.level} {one.line} -> {one.advice}" for one in fleet.found if one.check == link.check]
    assert link not in fleet.missing(), "\n".join(of_check)


async def test_nothing_wrong_is_said_of_the_sound_workers(fleet: BrokenFleet) -> None:
    wrong = [one for one in fleet.found if one.level in (Level.ERROR, Level.WARNING)]
    assert not [one for one in wrong if "sound" in one.line and one.check != "workers.address"]


async def test_the_command_exits_with_1_within_its_time_and_says_what_it_does(fleet: BrokenFleet) -> None:
    code, out = await run_doctor(fleet.installation, "--listen-s", "1.5", "--status-urls", fleet.page)
    assert code == 1 and "set --partitions 64" in out and "elsewhere (publisher at" in out


async def test_a_publisher_on_another_nats_is_named_there_too_and_when_it_is_stuck(fleet: BrokenFleet) -> None:
    async def errors_say(check: str, *texts: str) -> bool:
        found = await examine(fleet.other_nats, fleet.installation.valkey.url, listen_s=1.5, settle_s=0)
        lines = [f"{one.line} -> {one.advice}" for one in found if one.check == check and one.level is Level.ERROR]
        return any(all(text in line for text in texts) for line in lines)

    said = ("the indexers read a stream KVATLAS_EVENTS that was created", "has none", "the same --nats-url")
    await until(lambda: errors_say("nats.other", *said), deadline_s=DEADLINE_S, what="it names the other NATS")
    said = ("elsewhere: NATS at nats://127.0.0.1:", "no stream for the subject", "start an indexer on that NATS")
    await until(lambda: errors_say(SETTINGS, *said), deadline_s=DEADLINE_S, what="it says that there is no stream")
    client = await connect_nats(fleet.other_nats, name="test", wait=False)
    full = StreamConfig(name=STREAM, subjects=[ALL_EVENTS], max_msgs=1, discard=DiscardPolicy.NEW)
    await client.jetstream().add_stream(full)
    await client.close()
    said = (
        "elsewhere: NATS at nats://127.0.0.1:",
        "maximum messages exceeded",
        "check the storage and limits of JetStream",
    )
    await until(lambda: errors_say(SETTINGS, *said), deadline_s=DEADLINE_S, what="it says that it is stuck")
