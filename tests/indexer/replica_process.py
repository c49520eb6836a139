"""One indexer replica as a separate process: `python -m tests.indexer.replica_process NATS_URL REDIS_URL MEMBER_ID`.

Prints `ready` once it holds its first leases; ends when its standard input does, so it never outlives the test.
"""

import sys

import anyio
from anyio.to_thread import run_sync

from kvatlas_indexer.indexer_process import Replica
from kvatlas_indexer.service import IndexerSettings, run_indexer


def say_ready(_: Replica) -> None:
    print("ready", flush=True)


async def main(*arguments: str) -> None:
    nats_url, redis_url, member_id = arguments
    settings = IndexerSettings.load(
        nats_url=nats_url, redis_url=redis_url, member_id=member_id, status_port=0, stream_storage="memory"
    )
    async with anyio.create_task_group() as group:
        group.start_soon(run_indexer, settings, say_ready)
        await run_sync(sys.stdin.buffer.read, abandon_on_cancel=True)
        group.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
