"""The long form: rounds of random faults, several at once, for a given time; after each round the index must be exact."""

import random
import shutil
from collections.abc import Awaitable, Callable, Mapping
from time import monotonic

import anyio
import httpx
from anyio.to_thread import run_sync
from nats.errors import Error as NatsError
from nats.js.errors import Error as JetStreamError
from redis.exceptions import RedisError

from kvatlas.bus.subjects import STREAM, events_subject
from kvatlas.embedded.async_servers import EmbeddedServer
from tests.chaos.fleet import PARTITIONS, Fleet
from tests.chaos.report import Outcome
from tests.chaos.rogue import rogue_publisher
from tests.chaos.scenario_run import ScenarioRun
from tests.chaos.scenarios.bus import deliver_again
from tests.chaos.scenarios.store import LITTLE_BYTES, damage_by_hand, limit_memory
from tests.end_to_end.processes import ROOT
from tests.http_client import http_client

LONGEST_FAULT_S = 9.0
LONGEST_ROUND_S = 25.0
MOST_AT_ONCE = 4

Fault = Callable[[Fleet, random.Random], Awaitable[str]]
"""Breaks something, and returns what; an empty text if there was nothing to break."""


async def kill_engine(fleet: Fleet, rng: random.Random) -> str:
    worker = rng.choice(fleet.workers)
    if not worker.engine.is_running:
        return ""
    worker.engine.kill()
    return f"{worker.worker_id} SIGKILL"


async def put_engine_to_sleep(fleet: Fleet, rng: random.Random) -> str:
    worker = rng.choice(fleet.workers)
    try:
        async with http_client(timeout=1) as client:
            await client.post(f"{worker.url}/sleep")
    except httpx.HTTPError:
        return ""
    return f"{worker.worker_id} asleep"


async def kill_child(fleet: Fleet, rng: random.Random) -> str:
    child = rng.choice([worker.sidecar for worker in fleet.workers] + [indexer.child for indexer in fleet.indexers])
    if not child.is_running:
        return ""
    child.kill()
    return f"{child.name} SIGKILL"


async def stop_child(fleet: Fleet, rng: random.Random) -> str:
    child = rng.choice([worker.sidecar for worker in fleet.workers] + [indexer.child for indexer in fleet.indexers])
    if not child.is_running or child.paused:
        return ""
    await child.stop()
    return f"{child.name} SIGTERM"


async def change_version(fleet: Fleet, rng: random.Random) -> str:
    """Stop an indexer or a sidecar, and start another version of it."""
    child = rng.choice([worker.sidecar for worker in fleet.workers] + [indexer.child for indexer in fleet.indexers])
    if not child.is_running or child.paused:
        return ""
    await child.stop()
    child.tree = rng.choice([tree for tree in fleet.trees if tree != child.tree])
    return f"{child.name} SIGTERM, goes on in {'this' if child.tree == ROOT else 'the other'} version"


async def pause_child(fleet: Fleet, rng: random.Random) -> str:
    child = rng.choice(fleet.children)
    if not child.is_running or child.paused:
        return ""
    child.pause()
    return f"{child.name} SIGSTOP"


async def cut_line(fleet: Fleet, rng: random.Random) -> str:
    proxy = rng.choice(fleet.proxies)
    proxy.cut()
    return f"{proxy.name} cut"


async def stall_line(fleet: Fleet, rng: random.Random) -> str:
    proxy = rng.choice(fleet.proxies)
    proxy.stall()
    return f"{proxy.name} half-open"


async def slow_line(fleet: Fleet, rng: random.Random) -> str:
    proxy = rng.choice(fleet.proxies)
    proxy.delay_s = rng.uniform(0.01, 0.3)
    return f"{proxy.name} {proxy.delay_s * 1000:.0f} ms late"


async def reset_line(fleet: Fleet, rng: random.Random) -> str:
    """Reset connections; new ones work at once."""
    proxy = rng.choice(fleet.proxies)
    proxy.reset()
    return f"{proxy.name} reset"


async def kill_nats(fleet: Fleet, rng: random.Random) -> str:
    return await _kill_server(fleet.nats_server, "NATS", "jetstream", rng)


async def kill_redis(fleet: Fleet, rng: random.Random) -> str:
    return await _kill_server(fleet.valkey, "Redis", "appendonlydir", rng)


async def _kill_server(server: EmbeddedServer, name: str, data: str, rng: random.Random) -> str:
    if not server.is_running:
        return ""
    await server.kill()
    if rng.random() < 0.3:
        await run_sync(shutil.rmtree, server.process.data_dir / data)
        return f"{name} SIGKILL, data removed"
    return f"{name} SIGKILL"


async def pause_server(fleet: Fleet, rng: random.Random) -> str:
    server = rng.choice(fleet.servers)
    if not server.is_running:
        return ""
    server.pause()
    return f"{server.process.name} SIGSTOP"


async def flush_redis(fleet: Fleet, rng: random.Random) -> str:
    try:
        if rng.random() < 0.3:
            await fleet.store.client.function_flush()
            return "FUNCTION FLUSH"
        if rng.random() < 0.3:
            await fleet.store.client.flushall()
            return "FLUSHALL"
        shard = rng.randrange(4)
        keys = [key async for key in fleet.store.client.scan_iter(match=f"kva:{{s{shard}}}:*")]
        if keys:
            await fleet.store.client.unlink(*keys)
        return f"shard {shard} wiped"
    except (RedisError, OSError, KeyError):  # redis-py: KeyError if a primary changes during a scan
        return ""


async def fill_redis(fleet: Fleet, rng: random.Random) -> str:
    try:
        await limit_memory(fleet.store, LITTLE_BYTES)
    except (RedisError, OSError):
        return ""
    return "Redis out of memory"


async def damage_blocks(fleet: Fleet, rng: random.Random) -> str:
    """Add and remove blocks, change flags."""
    try:
        return "blocks damaged by hand" if await damage_by_hand(fleet.store) else ""
    except (RedisError, OSError, KeyError):  # redis-py: KeyError if a primary changes during a scan
        return ""


async def damage_stream(fleet: Fleet, rng: random.Random) -> str:
    jetstream = fleet.nats_client.jetstream(timeout=1)
    try:
        what = rng.choice(("purged", "deleted", "consumer deleted"))
        if what == "purged":
            await jetstream.purge_stream(STREAM)
        elif what == "deleted":
            await jetstream.delete_stream(STREAM)
        else:
            consumers = await jetstream.consumers_info(STREAM)
            if not consumers:
                return ""
            await jetstream.delete_consumer(STREAM, rng.choice(consumers).name)
        return f"stream {what}"
    except (NatsError, JetStreamError, TimeoutError):
        return ""


async def deliver_messages_again(fleet: Fleet, rng: random.Random) -> str:
    try:
        return await deliver_again(fleet.nats_client, rng.randint(1, 60), rng)
    except (NatsError, JetStreamError, TimeoutError):
        return ""


async def poison_stream(fleet: Fleet, rng: random.Random) -> str:
    worker = rng.choice(fleet.workers)
    try:
        subject = events_subject(worker.worker_id, PARTITIONS)
        await fleet.nats_client.jetstream(timeout=1).publish(subject, rng.randbytes(rng.randrange(200)))
    except (NatsError, JetStreamError, TimeoutError):
        return ""
    return f"poison in the stream of {worker.worker_id}"


async def attack_as_a_rogue(fleet: Fleet, rng: random.Random) -> str:
    """A publisher with a user of its own speaks for others, floods, and sends extreme values."""
    try:
        async with rogue_publisher(fleet, rng) as rogue:
            for _ in range(rng.randint(5, 30)):
                await rogue.attack()
    except (NatsError, TimeoutError, OSError):
        return ""
    return f"rogue publisher, {rogue.rounds} rounds"


async def damage_state(fleet: Fleet, rng: random.Random) -> str:
    """Damage a sidecar's saved state, which it reads at its next start."""
    worker = rng.choice(fleet.workers)
    file = worker.state_file
    if not file.exists():
        return ""
    content = file.read_bytes()
    if rng.random() < 0.5:
        file.write_bytes(content[: rng.randrange(len(content))])
        return f"saved state of {worker.worker_id} torn"
    at = rng.randrange(len(content))
    file.write_bytes(content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :])
    return f"saved state of {worker.worker_id} has a flipped bit"


FAULTS: dict[Fault, float] = {
    kill_engine: 1,
    put_engine_to_sleep: 0.7,
    kill_child: 3,
    stop_child: 2,
    pause_child: 3,
    cut_line: 2,
    stall_line: 2,
    slow_line: 1,
    reset_line: 2,
    pause_server: 1,
    kill_nats: 1,
    kill_redis: 1,
    flush_redis: 1,
    fill_redis: 0.7,
    damage_blocks: 0.7,
    damage_stream: 1.5,
    deliver_messages_again: 0.7,
    poison_stream: 0.7,
    attack_as_a_rogue: 1,
    damage_state: 1,
}
"""Relative frequency of each."""
UPGRADES: dict[Fault, float] = {change_version: 4}
"""Faults of a fleet that runs in two versions."""


async def run_random_faults(
    fleet: Fleet,
    faults: Mapping[Fault, float],
    seed: int,
    seconds: float,
    log: Callable[[str], None],
    outcomes: list[Outcome],
) -> None:
    """Run rounds of these faults until the time is up, adding each to `outcomes`. Raises AssertionError if the index is not
    exact after a round."""
    rng = random.Random(seed)
    ends_s = monotonic() + seconds
    while not outcomes or monotonic() < ends_s:
        run = ScenarioRun(fleet, f"round {len(outcomes) + 1}")
        run.under_reporting = {worker.worker_id for worker in fleet.workers}
        await run.begin()
        round_ends_s = min(monotonic() + rng.uniform(0.3, 1) * LONGEST_ROUND_S, ends_s + 1)
        while monotonic() < round_ends_s:
            for _ in range(rng.randint(1, MOST_AT_ONCE)):
                fault = rng.choices(list(faults), list(faults.values()))[0]
                if what := await fault(fleet, rng):
                    run.record_fault(what)
                    log(f"  {what}")
            await anyio.sleep(rng.random() ** 2 * LONGEST_FAULT_S)
            if rng.random() < 0.5:
                await fleet.heal()
                log("  all mended")
        await fleet.heal()
        run.mark_healed()
        outcome = await run.settle()
        await fleet.fill_large()
        await fleet.note_store_call()
        outcomes.append(outcome)
        log(
            f"round {len(outcomes)}: {len(outcome.faults)} faults, exact {outcome.exact_after_s:.2f} s after the last was "
            f"mended, {outcome.residencies} residencies, {outcome.wrong} wrong"
        )
