"""A publisher that sends heartbeats and requests for grants as fast as it can: `python -m tests.indexer.flooder NATS_URL`."""

import asyncio
import sys
from contextlib import suppress

from kvatlas.bus.connection import connect_nats
from kvatlas.bus.control import GrantRequest
from kvatlas.bus.subjects import alive_subject, grant_subject
from tests.indexer.bus_publisher import PARTITIONS, BusPublisher, heartbeat

WORKER = "flooder"
AT_ONCE = 100


async def flood(nats_url: str) -> None:
    """Send until the server is gone."""
    client = await connect_nats(nats_url, name=WORKER, wait=False)
    beat = heartbeat(BusPublisher(client, WORKER)).pack()
    request = GrantRequest(worker_id=WORKER, incarnation=1, snapshot_bytes=1).pack()
    print("flooding", flush=True)
    while client.is_connected:
        for _ in range(AT_ONCE):
            await client.publish(alive_subject(WORKER), beat)
            await client.publish(grant_subject(WORKER, PARTITIONS), request, reply="_INBOX.nobody")
        await client.flush(timeout=60)


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(flood(sys.argv[1]))
