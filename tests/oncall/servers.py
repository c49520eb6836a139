"""Server faults that are present when a fleet starts: a stream without space, an expired certificate."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from kvatlas.embedded import nats_server, valkey_server
from kvatlas.embedded.async_servers import EmbeddedServer
from tests.certificates import Authority
from tests.chaos.child_process import ChildProcess
from tests.end_to_end.processes import environment
from tests.oncall.tls_cluster import nats_of_three_with_tls


@asynccontextmanager
async def bus_and_store() -> AsyncIterator[tuple[EmbeddedServer, EmbeddedServer]]:
    async with nats_server() as nats, valkey_server() as store:
        yield nats, store


async def doctor(*flags: str) -> list[str]:
    """The doctor's lines."""
    command = [sys.executable, "-m", "kvatlas_cli.main", "doctor", "--listen-s", "1", *flags]
    done = await anyio.run_process(command, check=False, env=environment())
    return done.stdout.decode().splitlines()


def errors_of(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("error")]


async def stream_is_too_large(folder: Path) -> list[str]:
    """JetStream has less storage than the stream may take: the indexer itself reports one error with the cure."""
    async with nats_server(max_file_store_bytes=64 << 20) as nats, valkey_server() as store:
        flags = ["--nats-url", nats.url, "--redis-url", store.url]
        indexer = ChildProcess("indexer", ["indexer", *flags], "can't be created", folder)
        try:
            indexer.start()
            await indexer.ready()
            lines = await doctor(*flags)
        finally:
            indexer.close()
    found = errors_of(lines)
    print("\n".join(f"  {line}" for line in found))
    wrong = [] if "--stream-max-bytes" in lines[0] else [f"doctor's first line does not say the cure: {lines[0]}"]
    return wrong if len(found) == 2 else [*wrong, f"{len(found)} errors; expected the answer and its cause"]


async def certificate_has_expired(folder: Path) -> list[str]:
    """NATS' certificate has expired: the line says so, and blames no URL; after its renewal all is well."""
    authority = Authority(folder)
    issued = authority.issue("localhost", "127.0.0.1", days=-1)
    config = f'tls {{ cert_file: "{issued.certificate}", key_file: "{issued.key}" }}'
    async with nats_server(config=config) as nats, valkey_server() as store:
        url = nats.url.replace("nats://", "tls://")
        lines = await doctor("--nats-url", url, "--nats-ca-file", str(authority.file), "--redis-url", store.url)
    told = "\n".join(lines)
    print("\n".join(f"  {line}" for line in errors_of(lines)))
    wrong = [] if "its certificate has expired" in told else ["doctor does not say that the certificate has expired"]
    return [*wrong, *(["doctor blames the URL"] if "malformed" in told else [])]


SERVER_FAULTS: Mapping[str, Callable[[Path], Awaitable[list[str]]]] = {
    "stream_is_too_large": stream_is_too_large,
    "certificate_has_expired": certificate_has_expired,
    "nats_of_three_with_tls": nats_of_three_with_tls,
}
