"""`python -m benchmarks.rebuild [WORKERS]`: prints how long rebuilds of a wiped index take."""

import sys

import uvloop
from rich.console import Console

from benchmarks.rebuild import recovery
from benchmarks.result import tabulate
from benchmarks.stores import valkey_store
from kvatlas.embedded import nats_server


async def _main() -> None:
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else recovery.WORKERS
    async with nats_server() as nats, valkey_store() as store:
        results = await recovery.measure(store, nats.url, workers=workers, rounds=recovery.ROUNDS)
    Console(width=130).print(tabulate(results, "rebuild"))


if __name__ == "__main__":
    uvloop.run(_main())
