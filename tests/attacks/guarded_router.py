"""A fleet that several tenants use, and `kvatlas router` processes in front of it: with everything switched on, and with the
defaults."""

import asyncio
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from kvatlas.fleet_store.fleet_store import FleetStore
from kvatlas.identity import Scope
from kvatlas.store.connection import Store
from kvatlas_router.tenancy.proof import hash_of
from tests.end_to_end.processes import environment, kvatlas_command, line_with
from tests.router.proxy.engines import MODEL, Fleet, record, running_fleet

ACMES_PROMPT = list(range(1_000, 1_200))
"""Cached, for tenant acme, on the worker that anyone may use."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ACME, OTHER, WATCHER, OPERATOR = "acme-key", "other-key", "watcher-key", "operator-token"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def hints(**more: object) -> dict[str, object]:
    return {"model_id": MODEL, "token_ids": ACMES_PROMPT, **more}


def completion(**more: object) -> dict[str, object]:
    return {"model": MODEL, "prompt": ACMES_PROMPT, "max_tokens": 1, **more}


def clients_text(more: str = "", *, other: str = "") -> str:
    """A file of clients: two tenants, and one more key of acme that may see decisions."""
    return textwrap.dedent(f"""
        [clients.acme]
        keys = ["{hash_of(ACME.encode())}"]
        tenants = ["acme", "acme-test"]
        [clients.other]
        keys = ["{hash_of(OTHER.encode())}"]
        tenants = ["other"]
        {other}
        [clients.watcher]
        keys = ["{hash_of(WATCHER.encode())}"]
        tenants = ["acme"]
        decisions = true
        """) + textwrap.dedent(more)


@dataclass(slots=True)
class Recorder:
    """An engine that answers nothing, and remembers everything it was sent."""

    url: str = ""
    received: bytes = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            self.received += data
            writer.write(b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            break
        writer.close()


@asynccontextmanager
async def tenants_fleet(store: Store) -> AsyncIterator[tuple[Fleet, Recorder]]:
    """A worker for anyone, which holds a prompt of acme's, and one whose identity names only tenant acme."""
    recorder = Recorder()
    server = await asyncio.start_server(recorder.serve, "127.0.0.1", 0)
    recorder.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, running_fleet(store, {"any": {}}) as fleet:
        await fleet.holds("any", ACMES_PROMPT, Scope(MODEL, MODEL, None, "acme"))
        acmes = record("acmes", recorder.url).model_copy(update={"tenants": ("acme",)})
        await FleetStore(store).write({"acmes": acmes})
        yield fleet, recorder


@dataclass(frozen=True, slots=True)
class Process:
    """A router. `control`: its port for operators, which is the same one unless it has a separate one."""

    url: str
    control: str
    running: asyncio.subprocess.Process

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def log(self) -> list[str]:
        """Kill the router, and return the lines of its log that were not read yet."""
        self.running.kill()
        assert self.running.stderr is not None
        return (await self.running.stderr.read()).decode(errors="replace").split("\n")


@asynccontextmanager
async def router_process(
    redis_url: str, *flags: str, host: str = "127.0.0.1", said: str = ""
) -> AsyncIterator[Process]:
    """`said`: text in a line that it logs before it serves."""
    words = ["router", "--redis-url", redis_url, "--host", host, "--port", "0", "--tokenizer", "engine", *flags]
    process = await asyncio.create_subprocess_exec(
        *kvatlas_command(*words), stderr=asyncio.subprocess.PIPE, env=environment()
    )
    try:
        apart = (
            any(flag in flags for flag in ("--clients-file", "--control-port", "--cors-origins")) or host != "127.0.0.1"
        )
        if said:
            await line_with(said, process.stderr)
        control = (await line_with("operators' port", process.stderr)).split()[-1] if apart else ""
        ready = await line_with("router at", process.stderr)
        url = next(word for word in ready.split() if word.startswith(("http://", "https://"))).rstrip(";")
        url = url.replace("0.0.0.0", "127.0.0.1")
        yield Process(url, control or url, process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def guarded_router(
    redis_url: str, folder: Path, clients: str | None = None, *flags: str
) -> AsyncIterator[Process]:
    """Everything switched on: a file of clients, and a port for operators with a token."""
    (folder / "clients.toml").write_text(clients_text() if clients is None else clients)
    (folder / "operators").write_text(OPERATOR + "\n")
    given = ("--clients-file", str(folder / "clients.toml"), "--control-token-file", str(folder / "operators"))
    async with router_process(redis_url, *given, "--control-port", "0", *flags) as process:
        yield process
