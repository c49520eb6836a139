"""The stream on three NATS servers: its leader steps down, and is killed."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from nats.aio.client import Client
from nats.errors import Error as NatsError

from kvatlas.bus.connection import connect_nats
from kvatlas.bus.subjects import STREAM
from kvatlas.embedded import EmbeddedServer, nats_server
from kvatlas.embedded.free_port import free_port
from tests.chaos.fleet import running_fleet
from tests.chaos.proxy import LOOPBACK
from tests.chaos.report import Outcome
from tests.chaos.runner import INDEXER_ARGUMENTS
from tests.chaos.scenario_run import ScenarioRun
from tests.eventually import until

SERVERS = 3


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[list[EmbeddedServer]]:
    """Connected servers with a leader for their streams."""
    ports = [free_port() for _ in range(SERVERS)]
    routes = [f"nats://{LOOPBACK}:{port}" for port in ports]
    async with AsyncExitStack() as stack:
        servers = []
        for i, port in enumerate(ports):
            config = f"cluster: {json.dumps({'name': 'chaos', 'listen': f'{LOOPBACK}:{port}', 'routes': routes})}"
            servers.append(await stack.enter_async_context(nats_server(data_dir=folder / f"nats-{i}", config=config)))
        client = await connect_nats(servers[0].url, name="cluster")
        stack.push_async_callback(client.close)

        async def has_leader() -> bool:
            try:
                return "error" not in json.loads((await client.request("$JS.API.INFO", b"", timeout=1)).data)
            except NatsError:
                return False

        await until(has_leader, deadline_s=30, what="the servers have a leader")
        yield servers


async def leader(client: Client) -> str:
    """The name of the server that leads the event stream; empty while there is none."""
    try:
        answer = json.loads((await client.request(f"$JS.API.STREAM.INFO.{STREAM}", b"", timeout=1)).data)
    except NatsError:
        return ""
    return str(answer.get("cluster", {}).get("leader", ""))


async def nats_leader_changes(folder: Path, seed: int) -> Outcome:
    """On a fleet of its own. Raises AssertionError if the index does not become exact."""
    async with cluster(folder) as servers:
        arguments = (*INDEXER_ARGUMENTS, "--stream-replicas", str(SERVERS))
        async with running_fleet(
            folder, engines=2, indexers=2, seed=seed, indexer_arguments=arguments, nats=servers[0]
        ) as fleet:
            run = ScenarioRun(fleet, "nats_leader_changes")
            await run.begin()
            await _change_leaders(run, servers)
            return await run.settle()


async def _change_leaders(run: ScenarioRun, servers: Sequence[EmbeddedServer]) -> None:
    client = run.fleet.nats_client
    await run.wait_for_answers(10)
    for _ in range(2):
        before = await leader(client)
        await client.request(f"$JS.API.STREAM.LEADER.STEPDOWN.{STREAM}", b"", timeout=5)
        run.record_fault("the stream's leader steps down")

        async def is_another(before: str = before) -> bool:
            return await leader(client) not in ("", before)

        await until(is_another, deadline_s=20, what="another server leads the stream")
        await run.wait_for_answers(10)
    named = {await server_name(server): server for server in servers}
    leading = named[await leader(client)]
    await leading.kill()
    run.record_fault("NATS server that leads the stream SIGKILL")
    await run.wait_for_answers(30)
    await leading.start()
    run.mark_healed()


async def server_name(server: EmbeddedServer) -> str:
    client = await connect_nats(server.url, name="server-name")
    try:
        return str(client._server_info["server_name"])
    finally:
        await client.close()
