"""The stream on three NATS servers: its leader steps down, and servers are lost."""

import json
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from nats.aio.client import Client
from nats.errors import Error as NatsError

from kvatlas.bus.connection import connect_nats
from kvatlas.bus.subjects import STREAM
from kvatlas.embedded import EmbeddedServer, nats_server
from kvatlas.embedded.free_port import free_port
from tests.chaos.credentials import nats_config
from tests.chaos.proxy import LOOPBACK
from tests.chaos.scenario_run import ScenarioRun
from tests.eventually import until

SERVERS = 3


@asynccontextmanager
async def nats_cluster(folder: Path) -> AsyncIterator[list[EmbeddedServer]]:
    """Connected servers with a leader for their streams. They don't advertise each other: clients know all addresses, as with
    the official chart (`noAdvertise`)."""
    ports = [free_port() for _ in range(SERVERS)]
    routes = [f"nats://{LOOPBACK}:{port}" for port in ports]
    async with AsyncExitStack() as stack:
        servers = []
        for i, port in enumerate(ports):
            about = {"name": "chaos", "listen": f"{LOOPBACK}:{port}", "routes": routes, "no_advertise": True}
            config = f"cluster: {json.dumps(about)}\n{nats_config()}"
            servers.append(await stack.enter_async_context(nats_server(data_dir=folder / f"nats-{i}", config=config)))
        client = await connect_nats(servers[0].url, name="cluster")
        stack.push_async_callback(client.close)

        async def has_leader() -> bool:
            try:
                return "error" not in json.loads((await client.request("$JS.API.INFO", b"", timeout=1)).data)
            except NatsError:
                return False

        await until(has_leader, what="the servers have a leader")
        yield servers


async def leader(client: Client) -> str:
    """The name of the server that leads the event stream; empty while there is none."""
    try:
        answer = json.loads((await client.request(f"$JS.API.STREAM.INFO.{STREAM}", b"", timeout=1)).data)
    except NatsError:
        return ""
    return str(answer.get("cluster", {}).get("leader", ""))


async def has_all_replicas(client: Client) -> bool:
    """True if the stream's replicas are up to date."""
    try:
        answer = json.loads((await client.request(f"$JS.API.STREAM.INFO.{STREAM}", b"", timeout=1)).data)
    except NatsError:
        return False
    replicas = answer.get("cluster", {}).get("replicas", [])
    return len(replicas) == SERVERS - 1 and all(one["current"] and not one.get("offline") for one in replicas)


async def step_down(client: Client) -> None:
    """Raises nats errors."""
    await client.request(f"$JS.API.STREAM.LEADER.STEPDOWN.{STREAM}", b"", timeout=60)


async def nats_leader_changes(run: ScenarioRun) -> None:
    client = run.fleet.nats_client
    await run.wait_for_answers(10)
    for _ in range(2):
        before = await leader(client)
        await step_down(client)
        run.record_fault("the stream's leader steps down")

        async def is_another(before: str = before) -> bool:
            return await leader(client) not in ("", before)

        await until(is_another, what="another server leads the stream")
        await run.wait_for_answers(10)
    named = {await server_name(server): server for server in run.fleet.nats_servers}
    leading = named[await leader(client)]
    await leading.kill()
    run.record_fault("NATS server that leads the stream SIGKILL")
    await run.wait_for_answers(30)
    await leading.start()
    run.mark_healed()


async def nats_server_lost(run: ScenarioRun) -> None:
    """Lose each server in turn. Its clients continue at the others. It comes back without its files, as on another machine,
    and the next one is lost once it has the stream again."""
    for number, server in enumerate(run.fleet.nats_servers):
        await run.wait_for_answers(10)
        await server.kill()
        run.record_fault(f"NATS server {number} SIGKILL, its files removed")
        await run.wait_for_answers(10)
        remove_files(server)
        await server.start()
        await until(lambda: has_all_replicas(run.fleet.nats_client), deadline_s=60, what="it has the stream again")
    await run.wait_for_answers(10)
    run.mark_healed()


async def server_name(server: EmbeddedServer) -> str:
    client = await connect_nats(server.url, name="server-name")
    try:
        return str(client._server_info["server_name"])
    finally:
        await client.close()


def remove_files(server: EmbeddedServer) -> None:
    """Remove the files that JetStream keeps of a stopped server."""
    shutil.rmtree(server.process.data_dir / "jetstream")


NATS_SCENARIOS = (nats_leader_changes, nats_server_lost)
