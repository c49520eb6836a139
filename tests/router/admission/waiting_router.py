"""A router in a separate process, whose requests wait: `python -m tests.router.admission.waiting_router STORE REQUESTS`."""

import sys

import anyio

from kvatlas.reservations import RedisReservations
from kvatlas.store.connection import connected_store
from tests.router.admission.routers import PATIENT, Pool, Router


async def main(url: str, requests: int) -> None:
    async with connected_store(url, wait=False) as store, anyio.create_task_group() as tasks:
        router = Router(Pool(RedisReservations(store), ("a",), booked=1_000), "killed", PATIENT)
        for _ in range(requests):
            tasks.start_soon(router.admit, "t")


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], int(sys.argv[2]))
