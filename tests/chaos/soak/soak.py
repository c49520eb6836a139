"""`python -m tests.chaos soak SECONDS`: 64 simulated ranks behind one sidecar, two indexers, a router with a replica.

Ranks evict all the time, and some of them end and begin again. Memory of every process and of both stores is sampled; at the
end the index must be exact (`kvatlas audit`), memory flat, and every log line explained.
"""

import itertools
import random
import re
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic

import anyio

from benchmarks.child_processes import child_process
from benchmarks.peer.pipelines import free_ports
from benchmarks.process_usage import usage_of
from kvatlas.bus.connection import connect_nats
from kvatlas.bus.subjects import STREAM
from kvatlas.embedded import nats_server, valkey_server
from kvatlas.embedded.free_port import free_port
from kvatlas.store.connection import open_store
from tests.chaos.child_process import ChildProcess
from tests.chaos.soak.memory import MemorySamples
from tests.end_to_end.processes import query
from tests.http_client import http_client

RANKS, BLOCKS = 64, 500
STEPS_A_SECOND = 30.0
LIFE_S = 600.0
INDEXERS = 2
STREAM_BYTES = 4 << 20
"""Small, so that it is full after a quarter of an hour: while it grows, NATS takes more memory."""
ROUTER_DEADLINE_MS = 500
"""Above what other programs on the machine keep the store waiting: at the usual 10 ms they cause log lines."""
SAMPLE_S = 2.0
ROUTE_S = 0.2
PROMPT_TOKENS = 512
MODEL = "soak-model"
SETTLE_S = 30.0

EXPLAINED = re.compile("|".join([r"is ready", r"is published", r"router at", r"a new incarnation"]))
"""Lines that are due to starting processes and new lives of ranks. Processes log only warnings and errors."""


async def run_soak(seconds: float, folder: Path, log: Callable[[str], None]) -> bool:
    """Run the soak, and print the report; the samples and a plot are in `folder`. True if all is well."""
    samples = MemorySamples()
    children: list[ChildProcess] = []
    async with AsyncExitStack() as stack:
        nats = await stack.enter_async_context(nats_server(data_dir=folder / "nats"))
        valkey = await stack.enter_async_context(valkey_server())
        servers = ["--nats-url", nats.url, "--redis-url", valkey.url]

        def start(name: str, arguments: list[str], ready: str) -> ChildProcess:
            child = ChildProcess(name, [*arguments, "--log-level", "warning"], ready, folder)
            stack.callback(child.close)
            children.append(child)
            child.start()
            return child

        for number in range(INDEXERS):
            start(f"indexer-{number}", ["indexer", *servers, "--stream-max-bytes", str(STREAM_BYTES)], "is ready")
        first_port = free_ports(2 * RANKS)  # late, so that the other processes can't take one of them
        engines = await stack.enter_async_context(
            child_process("tests.chaos.soak.ranks", [*map(str, (first_port, RANKS, BLOCKS, STEPS_A_SECOND, LIFE_S))])
        )
        arguments = ["publish", "--engine", "mock", "--worker-id", "soak", "--model-id", MODEL, "--dp-size", str(RANKS)]
        arguments += ["--endpoint", f"tcp://127.0.0.1:{first_port}", "--nats-url", nats.url]
        arguments += [
            "--replay-endpoint",
            f"tcp://127.0.0.1:{first_port + RANKS}",
            "--state-dir",
            str(folder / "state"),
        ]
        start("sidecar", arguments, "is published")
        port = free_port()
        arguments = ["router", *servers, "--replica", "--tokenizer", "none", "--port", str(port), "--no-access-log"]
        arguments += ["--decision-deadline-ms", str(ROUTER_DEADLINE_MS)]
        start("router", arguments, "router at")
        for child in children:
            await child.ready()
        client = await connect_nats(nats.url, name="soak")
        stack.push_async_callback(client.close)
        store = await open_store(valkey.url)
        stack.push_async_callback(store.close)
        http = await stack.enter_async_context(http_client(base_url=f"http://127.0.0.1:{port}", timeout=10))
        log(f"{RANKS} ranks, {seconds:g} s; logs, samples and plot in {folder}")
        began = monotonic()

        async def sample() -> None:
            pids = {child.name: child.pid for child in children} | {"NATS": nats.pid, "Valkey": valkey.pid}
            sizes = {name: usage_of(pid).rss_bytes for name, pid in pids.items()}
            sizes["Valkey's data"] = int((await store.client.info("memory"))["used_memory"])
            sizes["NATS' stream"] = (await client.jetstream().stream_info(STREAM)).state.bytes
            samples.add(monotonic() - began, sizes)

        routed = 0

        async def route() -> None:
            nonlocal routed
            rng = random.Random(2)
            for number in itertools.count():
                tokens = [rng.randrange(50_000) for _ in range(PROMPT_TOKENS)]
                request = {"token_ids": tokens, "request_id": f"r{number}"}
                answer = await http.post("/kvatlas/route", json=request)
                if answer.is_success:
                    routed += 1
                    await http.post("/kvatlas/done", json={"id": answer.json().get("id"), "status": 200})
                await anyio.sleep(ROUTE_S)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(route)
            while monotonic() - began < seconds:
                await sample()
                await anyio.sleep(SAMPLE_S)
            tasks.cancel_scope.cancel()
        samples.write(folder / "memory.csv")
        samples.plot(folder / "memory.png")
        await engines.start()
        await engines.results()
        status = (await http.get("/status")).json()["replica"]
        exact = await _becomes_exact(servers, log)
    growths = samples.growths()
    for growth in growths:
        log(str(growth))
    lines = [f"{child.name}: {line}" for child in children for line in unexplained(child.log.read_text())]
    log(f"{routed} choices; replica {status}")
    log(f"{len(lines)} lines in the logs that churn does not explain")
    for line in lines[:50]:
        log(f"  {line}")
    return exact and not lines and all(growth.is_flat for growth in growths)


def unexplained(text: str) -> list[str]:
    """The lines of a log that neither the start nor churn explains."""
    return [line for line in text.splitlines() if line.strip() and not EXPLAINED.search(line)]


async def _becomes_exact(servers: list[str], log: Callable[[str], None]) -> bool:
    """True if `kvatlas audit` finds nothing once the load is over."""
    deadline = monotonic() + SETTLE_S
    while True:
        try:
            await query("audit", *servers)
        except AssertionError as error:
            if monotonic() > deadline:
                log(f"NOT EXACT: {error}")
                return False
            await anyio.sleep(1)
        else:
            log("exact: kvatlas audit found no difference")
            return True
