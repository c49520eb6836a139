"""A rolling upgrade with both versions running: `python -m tests.upgrade REV` (a commit of this repository, for example
HEAD~1).

Indexers of REV and of this tree take turns on the same servers while workers publish; the older one also goes on after
the newer one has stopped. After every step the index must be exact, read by the newer version's command, and by the
older one's as long as it knows the store's layout. Exit code 0 if it always was.
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio

from kvatlas.bus.connection import connect_nats
from kvatlas.bus.stream import StreamSettings, ensure_stream
from kvatlas.embedded import nats_server, valkey_server
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import open_store
from tests.end_to_end.processes import ROOT, environment
from tests.eventually import until
from tests.indexer.bus_publisher import PARTITIONS, BusPublisher, has_applied_all
from tests.indexer.running_replica import answering_requests

WORKERS = 6
BLOCKS = 2_000
"""Of a message: more than one call to the store takes."""


@asynccontextmanager
async def indexer(tree: Path, nats_url: str, redis_url: str, member_id: str) -> AsyncIterator[None]:
    """A replica of the version in this folder, from its first leases on."""
    arguments = ("-m", "tests.indexer.replica_process", nats_url, redis_url, member_id)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**environment(), "PYTHONPATH": str(tree)},
        cwd=tree,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        with anyio.fail_after(60):
            assert await process.stdout.readline(), f"the indexer of {tree} ended"
        yield
        assert process.returncode is None, f"the indexer of {tree} ended by itself"
    finally:
        process.stdin.close()
        with anyio.CancelScope(shield=True):
            await process.wait()


async def exported(tree: Path, redis_url: str) -> set[tuple[str, int]] | None:
    """(worker, sequence hash) of every residency, as the version in this folder reads it; None if it is too old for that."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "kvatlas_cli.main", "export", "--redis-url", redis_url),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**environment(), "PYTHONPATH": str(tree)},
        cwd=tree,
    )
    out, err = await process.communicate()
    if tree != ROOT and process.returncode == 1 and b"layout version" in err:
        return None
    assert process.returncode == 0, f"export of {tree} failed: {err.decode()}"
    rows = [json.loads(line) for line in out.splitlines()]
    return {(row["worker"], int(row["sequence_hash"], 16)) for row in rows}


async def check(
    what: str, trees: Sequence[Path], redis_url: str, nats_url: str, publishers: Sequence[BusPublisher]
) -> None:
    """Publish more, wait until it is applied, and compare. Raises AssertionError."""
    for publisher in publishers:
        await publisher.store_more(BLOCKS)
        await publisher.send(publisher.remove(*next((scope, key) for scope, key in publisher.held)))
    store = await open_store(redis_url, wait=False)
    try:
        index = await open_redis_index(store, partitions=PARTITIONS, shards=1, writer=False)
        await until(lambda: has_applied_all(index, *publishers), deadline_s=120, what=f"{what}: all is applied")
    finally:
        await store.close()
    held = {(one.worker_id, int.from_bytes(key, "little")) for one in publishers for _, key in one.held}
    for tree in trees:
        found = await exported(tree, redis_url)
        if found is None:
            continue
        assert found == held, f"{what}: read from {tree}, {len(found - held)} wrong, {len(held - found)} missing"
    print(f"{what}: {len(held)} residencies exact", flush=True)


async def run(revision: str, folder: Path) -> None:
    """Raises AssertionError."""
    old = folder / "old"
    old.mkdir()
    archive = f"git -C '{ROOT}' archive '{revision}' | tar x -C '{old}'"
    process = await asyncio.create_subprocess_shell(archive)
    assert await process.wait() == 0 and (old / "indexer").is_dir(), f"no revision {revision}"
    async with AsyncExitStack() as servers:
        nats, store = [await servers.enter_async_context(server) for server in (nats_server(), valkey_server())]
        client = await connect_nats(nats.url, name="upgrade", wait=False)
        servers.push_async_callback(client.close)
        await ensure_stream(client, StreamSettings(storage="memory", max_bytes=256 << 20))
        publishers = [BusPublisher(client, f"w{number}") for number in range(WORKERS)]
        await servers.enter_async_context(answering_requests(client, publishers))

        async def exact(what: str) -> None:
            await check(what, (old, ROOT), store.url, nats.url, publishers)

        async with indexer(old, nats.url, store.url, "old"):
            for publisher in publishers:
                await publisher.start()
            await exact("the older version alone")
            async with indexer(ROOT, nats.url, store.url, "new"):
                await exact("both versions")
            await exact("the older version again")
            async with indexer(ROOT, nats.url, store.url, "new-again"):
                await exact("both versions again")
                await servers.enter_async_context(indexer(ROOT, nats.url, store.url, "newer"))
        await exact("the newer version alone")


def main() -> None:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory(prefix="kvatlas-upgrade-") as folder:
        try:
            anyio.run(run, sys.argv[1], Path(folder))
        except* (AssertionError, TimeoutError) as errors:
            print(f"NOT EXACT: {errors.exceptions[0]}", file=sys.stderr)
            sys.exit(1)


if __name__ == "__main__":
    main()
