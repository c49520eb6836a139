"""An HTTP server inside a process that does other work too: a bound socket, and uvicorn without signal handlers."""

import contextlib
import socket
from collections.abc import Iterator

import anyio
import uvicorn
from anyio.abc import TaskStatus
from starlette.applications import Starlette

from kvatlas.errors import SettingsError


def listen(host: str, port: int, what: str) -> socket.socket:
    """Bind a socket; port 0 takes a free port. Raises SettingsError, naming `what`, if the address can't be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SettingsError(f"{what} can't listen on {host}:{port}: {error.strerror or error}") from error
    listener.setblocking(False)
    return listener


def url_of(listener: socket.socket) -> str:
    """The base URL of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    application: Starlette,
    listener: socket.socket,
    *,
    grace_s: int = 1,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled, then give open responses `grace_s` to end. `task_status` is started once it accepts.

    With a grace of 0 uvicorn logs that it cancelled tasks even if there were none.
    """
    config = uvicorn.Config(
        application, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=grace_s
    )
    server = _Server(config, task_status)

    async def stop_when_cancelled() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            server.should_exit = True

    try:
        async with anyio.create_task_group() as running:
            running.start_soon(stop_when_cancelled)
            with anyio.CancelScope(shield=True):
                await server.serve(sockets=[listener])
            running.cancel_scope.cancel()
    finally:
        listener.close()


class _Server(uvicorn.Server):
    """Leaves signals to the process, and reports when it accepts connections."""

    def __init__(self, config: uvicorn.Config, task_status: TaskStatus[None]) -> None:
        super().__init__(config)
        self._task_status = task_status

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._task_status.started()
