"""Extreme and malformed values at every border of running processes: `python -m tests.fuzz SECONDS SEED`.

Two engines with sidecars, an indexer, a router, and a hostile engine with its own sidecar run as processes. Every
CHECK_EVERY_S, all of them must be alive, without a traceback in a log, and the index must hold exactly what the two engines
hold. At the end, every border that can refuse must have counted refusals and named the worker. Exit code 0 only then. A seed
gives the same values in the same order; which of them coincide depends on the machine.
"""

import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from time import monotonic

import anyio

from kvatlas.bus.control import ControlOp, ControlReply, ControlRequest
from kvatlas.bus.subjects import control_subject
from tests.eventually import until
from tests.fuzz.borders import BORDERS, throw
from tests.fuzz.targets import HOSTILE, Targets, running_targets
from tests.http_client import http_client

CHECK_EVERY_S = 20.0
EXACT_WITHIN_S = 40.0


async def fuzz(seconds: float, seed: int, folder: Path) -> None:
    """Raises AssertionError if a process ends or writes a traceback, an index is not exact, or a refusal is not counted."""
    rng = Random(seed)
    thrown: Counter[str] = Counter()
    async with running_targets(folder, seed) as targets:
        end_s = monotonic() + seconds
        checks = 0
        while monotonic() < end_s:
            targets.fleet.load.resume()
            check_s = min(end_s, monotonic() + CHECK_EVERY_S)
            while monotonic() < check_s:
                name = rng.choice(list(BORDERS))
                thrown[name] += await throw(BORDERS[name], targets, rng)
                if ended := targets.ended():
                    raise AssertionError(f"after {name}: {ended[0]}")
                await anyio.sleep(0.01)
            await check(targets)
            checks += 1
            log(f"{sum(thrown.values())} values thrown, all processes live, {checks} checks exact")
        log("thrown: " + ", ".join(f"{name} {count}" for name, count in sorted(thrown.items())))
        log("refused: " + ", ".join(f"{name} {count}" for name, count in (await refusals(targets, thrown)).items()))


async def check(targets: Targets) -> None:
    """Check that all processes are alive, that none wrote a traceback, and that the two engines' workers are exact."""
    fleet = targets.fleet
    await fleet.load.pause()

    async def is_exact() -> bool:
        return not await fleet.checker.compare_digests()

    try:
        await until(is_exact, deadline_s=EXACT_WITHIN_S, what="the index is exact")
    except AssertionError:
        raise AssertionError(f"not exact: {await fleet.checker.compare_digests()}") from None
    engines = {worker.worker_id for worker in fleet.workers}
    exported = {worker_id: held for worker_id, held in (await fleet.export()).items() if worker_id in engines}
    comparison = await fleet.checker.compare(exported)
    assert not comparison.problem, comparison.problem
    assert not targets.ended(), targets.ended()[0]
    assert not targets.tracebacks(), targets.tracebacks()[0]


async def refusals(targets: Targets, thrown: Counter[str]) -> dict[str, int]:
    """The refusals that the processes counted. Raises AssertionError if a border counted none although it got many values, or
    if a log does not name the worker."""
    client = targets.fleet.nats_client
    request = ControlRequest(op=ControlOp.STATUS)
    reply = ControlReply.unpack((await client.request(control_subject(HOSTILE), request.pack(), timeout=10)).data)
    assert reply.status is not None
    sidecar = reply.status["counters"]
    async with http_client(timeout=10) as http:
        indexer = (await http.get(f"{targets.urls[1]}/status")).json()["counters"]
    counted = {
        "engine_payloads": sidecar["poison"] + sidecar["skipped_events"],
        "metrics_pages": sidecar["load_failures"],
        "control_requests": sidecar["control_bad"],
        "heartbeats": indexer["heartbeats_bad"],
        "messages": sum(count for name, count in indexer.items() if name.startswith("poison_")),
        "grant_requests": indexer["grants_bad"],
        "pool_records": indexer["pools_repaired"],
    }
    for name, count in counted.items():
        assert count or thrown[name] < 50, f"{thrown[name]} thrown at {name}, none counted as refused"
    text = targets.fleet.indexers[0].child.log_text()
    assert "stranger-" in text or not thrown["heartbeats"], "the indexer's log names no refused worker"
    return counted


def log(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    """Exit with 0, with 1 if something failed, or with 2 for wrong usage."""
    try:
        seconds, seed = float(sys.argv[1]), int(sys.argv[2])
    except (IndexError, ValueError):
        log("usage: python -m tests.fuzz SECONDS SEED")
        sys.exit(2)
    folder = Path(tempfile.mkdtemp(prefix="kvatlas-fuzz-"))
    log(f"seed {seed}, {seconds:g} s; logs in {folder}")
    try:
        anyio.run(fuzz, seconds, seed, folder)
    except* AssertionError as errors:
        error: BaseException = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        log(f"FAILED: {error}")
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
