"""A collector follows the pods that a Kubernetes API lists, with real engines and a real NATS."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import nats
import pytest
from nats.aio.msg import Msg

from kvatlas.bus.subjects import ALL_ALIVE
from kvatlas.settings import CollectSettings
from kvatlas_cli.collector import Collector, Pod, read_pod
from tests.eventually import until
from tests.router.gateway.kubernetes import Namespace, Object, namespace_of
from tests.simulator.running_engine import running_engine

pytestmark = pytest.mark.anyio


def pod_object(
    name: str, ip: str = "127.0.0.1", app: str = "engine", phase: str = "Running", **metadata: str
) -> Object:
    return {
        "metadata": {"name": name, "labels": {"app": app}, **metadata},
        "spec": {"nodeName": "node-1"},
        "status": {"podIP": ip, "phase": phase},
    }


@asynccontextmanager
async def collecting(namespace: Namespace, port: int, nats_url: str, folder: Path) -> AsyncIterator[dict[str, bytes]]:
    """Yields the last heartbeat of each worker; a removed entry comes back with the worker's next heartbeat."""
    heard: dict[str, bytes] = {}

    async def note(message: Msg) -> None:
        heard[message.subject.rpartition(".")[2]] = message.data

    client = await nats.connect(nats_url)
    await client.subscribe(ALL_ALIVE, cb=note)
    settings = CollectSettings.load(selector="app=engine", engine_port=port, nats_url=nats_url)
    try:
        async with namespace.open() as api, anyio.create_task_group() as tasks:
            tasks.start_soon(Collector(api, settings, folder).run)
            yield heard
            tasks.cancel_scope.cancel()
    finally:
        await client.close()


async def test_a_pod_with_the_label_is_published_drained_and_left(
    fresh_nats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ""

    def says(line: str) -> bool:
        nonlocal said
        said += "".join(capsys.readouterr())
        return line in said

    async with running_engine(model="m", speed_up=100.0) as (engine, _):
        pods = [pod_object("llama-3.1-x"), pod_object("other", app="other"), pod_object("waits", phase="Pending")]
        namespace = namespace_of(tmp_path, [], pods)
        port = urlsplit(engine.base_url).port or 0
        async with collecting(namespace, port, fresh_nats, tmp_path) as heard:
            await until(lambda: "llama-3_1-x" in heard, what="its heartbeats")
            assert heard.keys() == {"llama-3_1-x"}
            await until(lambda: says("worker llama-3_1-x is published"), what="it is published")
            namespace.status = 503
            heard.clear()
            await until(lambda: "llama-3_1-x" in heard, what="it stays while Kubernetes does not answer")
            namespace.status = 200
            namespace.objects["v1"]["pods"][0] = pod_object("llama-3.1-x", deletionTimestamp="2026-01-01T00:00:00Z")
            await until(lambda: says("worker llama-3_1-x drains"), what="routers send it nothing new")
            namespace.objects["v1"]["pods"] = [pod_object("next")]
            await until(lambda: says("pod llama-3.1-x is gone"), what="it is left")
            await until(lambda: "next" in heard, what="the next pod's heartbeats")


async def test_a_pod_that_does_not_answer_yet_holds_up_no_other(fresh_nats: str, tmp_path: Path) -> None:
    async with running_engine(model="m", speed_up=100.0) as (engine, _):
        namespace = namespace_of(tmp_path, [], [pod_object("silent", "127.0.0.9"), pod_object("speaks")])
        port = urlsplit(engine.base_url).port or 0
        async with collecting(namespace, port, fresh_nats, tmp_path) as heard:
            await until(lambda: "speaks" in heard, what="the heartbeats of the one that answers")


@pytest.mark.parametrize(
    "found",
    [
        None,
        {},
        {"metadata": {}},
        {"metadata": {"name": "a"}, "status": {}},
        {"metadata": {"name": "a"}, "status": {"podIP": ""}},
    ],
)
def test_what_is_no_running_pod_is_passed_over(found: object) -> None:
    assert read_pod(found) is None
    assert read_pod(pod_object("a", phase="Succeeded")) is None
    assert read_pod(pod_object("a")) == Pod("a", "127.0.0.1", "node-1")
