"""A child process that publishes synthetic events through the real outbox and sender as fast as it can:
`python -m benchmarks.stream.synthetic_publisher NATS_URL HASHES_A_MESSAGE MESSAGES`.

It ends when the stream has acknowledged everything, and prints the CPU time that it took.
"""

import asyncio
import os
import sys
from contextlib import AbstractAsyncContextManager
from time import process_time, time_ns

import uvloop

from benchmarks.child_processes import Child, child_process
from kvatlas.blocks.digest import Digest
from kvatlas.blocks.tiers import Tier
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.subjects import events_subject
from kvatlas.events import ScopeUse, Stored
from kvatlas.identity import Scope
from kvatlas_publishers.counters import PublisherCounters
from kvatlas_publishers.stream.outbox import Outbox
from kvatlas_publishers.stream.sender import Sender

PARTITIONS = 64
WORKERS = 16
USE = ScopeUse(Scope("bench", "bench"), 16)
TICK_S = 0.002


def publisher_process(nats_url: str, hashes_a_message: int, messages: int) -> AbstractAsyncContextManager[Child]:
    """This module as a child process."""
    args = [nats_url, str(hashes_a_message), str(messages)]
    return child_process("benchmarks.stream.synthetic_publisher", args)


def worker_names(hashes_a_message: int) -> list[str]:
    return [f"synthetic-{hashes_a_message}-{i}" for i in range(WORKERS)]


async def publish(nats_url: str, hashes_a_message: int, messages: int) -> None:
    client = await connect_nats(nats_url, name="kvatlas-bench", wait=False)
    scope_id = USE.scope.scope_id
    uses = {scope_id: USE}
    streams = []
    for worker_id in worker_names(hashes_a_message):
        outbox = Outbox(worker_id)
        outbox.begin(time_ns(), [], Digest().words, uses, time_ns() // 1000)
        sender = Sender(client, outbox, events_subject(worker_id, PARTITIONS), PublisherCounters())
        await sender.start()
        streams.append((outbox, sender))
    hashes = os.urandom(8 * hashes_a_message * messages)
    step = 8 * hashes_a_message
    tasks = [asyncio.create_task(sender.run()) for _, sender in streams]
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    began = process_time()
    for i in range(messages):
        outbox, sender = streams[i % WORKERS]
        event = Stored(scope_id, Tier.HBM, hashes[i * step : (i + 1) * step])
        outbox.put([event], uses, time_ns() // 1000)
        sender.wake()
        if i % 256 == 255:
            await asyncio.sleep(0)
            while outbox.waiting > 4_096:
                await asyncio.sleep(TICK_S)
    while any(not outbox.empty for outbox, _ in streams):
        await asyncio.sleep(TICK_S)
    print(process_time() - began)
    print("done", flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for _, sender in streams:
        await sender.stop()
    await client.close()


if __name__ == "__main__":
    uvloop.run(publish(sys.argv[1], *map(int, sys.argv[2:])))
