"""The status page: `/healthz`, `/readyz` and `/status` (JSON), for people and for Kubernetes' probes."""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from indexer.replica import Replica
from kvatlas.errors import SettingsError


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises SettingsError where the address can't be listened on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingsError(f"status page can't listen on {host}:{port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a bound socket is reached."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(replica: Replica, listener: socket.socket) -> None:
    """Serves until cancelled."""
    config = uvicorn.Config(application(replica), log_config=None, access_log=False, lifespan="off")
    server = _Server(config)
    try:
        await server.serve(sockets=[listener])
    finally:
        listener.close()


def application(replica: Replica) -> Starlette:
    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_: Request) -> Response:
        if replica.ready:
            return PlainTextResponse("ready\n")
        return PlainTextResponse("not ready: NATS or the store does not answer\n", status_code=503)

    async def status(_: Request) -> Response:
        return JSONResponse(status_of(replica))

    return Starlette(routes=[Route("/healthz", healthz), Route("/readyz", readyz), Route("/status", status)])


def status_of(replica: Replica) -> dict[str, Any]:
    """What `/status` says."""
    workers = replica.workers
    return {
        "member_id": replica.member_id,
        "ready": replica.ready,
        "members": replica.membership.members,
        "partitions": [asdict(partition) for partition in replica.partitions],
        "workers": {worker_id: liveness.value for worker_id, liveness in sorted(workers.items())},
        "workers_in_doubt": {worker_id: doubt.value for worker_id, doubt in sorted(replica.doubts.items())},
        "retired_holders": replica.retired_holders,
        "granted_snapshot_bytes": replica.granted_bytes,
        "counters": replica.counters.to_jsonable(),
    }


class _Server(uvicorn.Server):
    """Leaves the process' signals to whoever started the indexer."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
