"""A fleet on three NATS servers with TLS everywhere and users proven by certificates. All certificates are renewed while
requests run, and each server is lost, and then stands still, for a while."""

import json
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic

import anyio

from kvatlas.embedded import EmbeddedServer, nats_server, valkey_server
from kvatlas.embedded.free_port import LOOPBACK, free_port
from tests.certificates import Authority
from tests.chaos.proxy import TcpProxy
from tests.end_to_end.processes import environment, kvatlas_command
from tests.oncall.fleet import Fleet, Said, child, engine, sidecar

SERVERS = 3
USERS = ("publisher", "indexer", "auditor")
GREEN_S = 120.0
STILL_S = 15.0


class Certificates:
    """The certificates of servers and users, in one folder, each under its name."""

    def __init__(self, folder: Path) -> None:
        self._authority = Authority(folder)
        self._folder = folder
        self.renew()

    def renew(self) -> None:
        for name in (*USERS, *(f"nats-{number}" for number in range(SERVERS))):
            self._authority.issue(*([name] if name in USERS else [LOOPBACK]), days=30, file=name)

    def of_server(self, number: int) -> Mapping[str, str]:
        """A server's files, as NATS' configuration names them."""
        file = str(self._folder / f"nats-{number}")
        return {"cert_file": f"{file}.pem", "key_file": f"{file}.key", "ca_file": str(self._authority.file)}

    def flags(self, user: str) -> list[str]:
        file = str(self._folder / user)
        flags = ["--nats-ca-file", str(self._authority.file), "--nats-cert-file", f"{file}.pem"]
        return [*flags, "--nats-key-file", f"{file}.key", "--nats-inbox", f"_INBOX.{user}"]


@asynccontextmanager
async def tls_servers(folder: Path, certificates: Certificates, users: str) -> AsyncIterator[list[EmbeddedServer]]:
    """`users`: the users' part of NATS' configuration."""
    ports = [free_port() for _ in range(SERVERS)]
    async with AsyncExitStack() as stack:
        servers = []
        for number, port in enumerate(ports):
            tls = certificates.of_server(number)
            cluster = {
                "name": "tls",
                "listen": f"{LOOPBACK}:{port}",
                "routes": [f"nats://{LOOPBACK}:{other}" for other in ports],
                "no_advertise": True,
                "tls": {**tls, "verify": True},
            }
            config = f"tls: {json.dumps({**tls, 'verify_and_map': True})}\ncluster: {json.dumps(cluster)}\n{users}"
            servers.append(await stack.enter_async_context(nats_server(data_dir=folder / f"n{number}", config=config)))
        yield servers


@asynccontextmanager
async def tls_fleet(
    folder: Path, servers: Sequence[EmbeddedServer], certificates: Certificates
) -> AsyncIterator[tuple[Fleet, list[str]]]:
    """A fleet of one engine, and the flags with which doctor reaches the servers."""
    nats = ["--nats-url", ",".join(one.url.replace("nats://", "tls://") for one in servers)]
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(valkey_server())
        near = await stack.enter_async_context(TcpProxy(int(store.url.rpartition(":")[2].split("/")[0]), "store"))
        fleet = Fleet(folder, servers[0], store, near)
        stack.callback(fleet.close)
        engine_ports, port = [free_port(), free_port(), free_port()], free_port()
        fleet.engines.append(engine(fleet, "engine", engine_ports))
        as_publisher = [*nats, *certificates.flags("publisher")]
        fleet.sidecars.append(sidecar(fleet, "sidecar", "w0", engine_ports, *as_publisher))
        flags = [*nats, *certificates.flags("indexer"), "--redis-url", fleet.redis_url]
        fleet.parts["indexer"] = child(
            fleet, "indexer", "is ready", "indexer", *flags, "--stream-replicas", str(SERVERS)
        )
        routing = ["--redis-url", fleet.redis_url, "--port", str(port), "--drain-s", "0", "--no-access-log"]
        late = {"KVATLAS_DECISION_DEADLINE_MS": "2000"}
        fleet.parts["router"] = child(fleet, "router", "router at", "router", *routing, **late)
        fleet.router_url = f"http://{LOOPBACK}:{port}"
        every = [*fleet.engines, *fleet.sidecars, *fleet.parts.values()]
        for part in every:
            part.start()
        for part in every:
            await part.ready()
        yield fleet, [*nats, *certificates.flags("auditor")]


async def nats_of_three_with_tls(folder: Path) -> list[str]:
    """Everything that went wrong, one line each."""
    certificates = Certificates(folder)
    write = kvatlas_command("auth", "nats", "--method", "certificate", "--out", str(folder / "users"))
    await anyio.run_process(write, env=environment())
    users = (folder / "users" / "nats-users.conf").read_text()
    wrong: list[str] = []
    async with (
        tls_servers(folder, certificates, users) as servers,
        tls_fleet(folder, servers, certificates) as (fleet, flags),
        anyio.create_task_group() as group,
    ):
        group.start_soon(fleet.send_requests)
        wrong += await not_green("before", fleet, flags)
        fleet.failures.clear()
        certificates.renew()
        for server in servers:
            os.kill(server.pid, signal.SIGHUP)
        wrong += await not_green("certificates renewed", fleet, flags)
        for number, server in enumerate(servers):
            await server.kill()
            wrong += await not_green(f"server {number} lost", fleet, flags)
            await server.start()
            wrong += await not_green(f"server {number} back", fleet, flags)
        for number, server in enumerate(servers):
            server.pause()
            await anyio.sleep(STILL_S)  # clients leave it
            server.resume()
            wrong += await not_green(f"server {number} goes on", fleet, flags)
        wrong += [f"{fleet.failed} requests lost: {dict(fleet.failures)}"] if fleet.failed or not fleet.answered else []
        print(f"  {fleet.answered} requests answered, {fleet.failed} lost")
        group.cancel_scope.cancel()
    return [f"nats_of_three_with_tls: {one}" for one in wrong]


async def not_green(when: str, fleet: Fleet, flags: Sequence[str]) -> list[str]:
    """What the doctor still finds after GREEN_S."""
    deadline_s = monotonic() + GREEN_S
    said: Said = await fleet.ask_doctor(*flags)
    while not said.green and monotonic() < deadline_s:
        await anyio.sleep(1.0)  # between two looks
        said = await fleet.ask_doctor(*flags)
    print(f"  {when}: {said.answer}", flush=True)
    findings = [f"{check}: {lines}" for check, lines in said.findings.items()]
    return [] if said.green else [f"{when}: {line}" for line in (said.answer, *findings)]
