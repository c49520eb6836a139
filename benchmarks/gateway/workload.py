"""The demo's workload through `kvatlas router`, and through Envoy and `kvatlas epp`: hit rate, TTFT, predictions."""

import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.child_processes import server_process
from benchmarks.gateway.envoy import EnvoyProcess, Listener
from kvatlas_simulator.demo.demo import MODEL, SETTLE_S, SHARED_MACHINE, DemoSettings, open_probe, run_phases
from kvatlas_simulator.demo.processes import FleetSettings, running_fleet, wait_until_routable
from kvatlas_simulator.demo.report import Phase
from kvatlas_simulator.workload import generate_workload

TURNS = 2
"""Turns of each way, run one after another, because they share the machine."""


async def measure() -> list[Phase]:
    """Measure every turn of each way, as one phase each."""
    settings = DemoSettings.load()
    console = Console(stderr=True)
    flags = ["--num-gpu-blocks", str(settings.num_gpu_blocks), "--speed-up", str(settings.speed_up)]
    fleet_settings = FleetSettings(
        MODEL, settings.engines, settings.indexers, flags, {"kvatlas router": SHARED_MACHINE}
    )
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvatlas-gateway-")))
        fleet = await stack.enter_async_context(running_fleet(fleet_settings, folder))
        probe = await stack.enter_async_context(open_probe(fleet))
        await wait_until_routable(probe.store, len(fleet.engines), SETTLE_S)
        args = ["epp", "--redis-url", fleet.redis_url, "--port", "0", "--health-port", "0", "--drain-s", "0"]
        args += [*SHARED_MACHINE, "--log-level", "warning"]
        picker = await stack.enter_async_context(server_process("kvatlas_cli.main", args, r"picker on port (\d+)"))
        name = "Envoy, kvatlas epp"
        envoy = stack.enter_context(EnvoyProcess({name: Listener(int(picker.announced))}))
        found: list[Phase] = []
        for _ in range(TURNS):
            ways = {**fleet.routers, **envoy.urls}
            found += await run_phases(console, settings, generate_workload(settings.workload), ways, probe)
        return found


def tabulate(found: Sequence[Phase]) -> Table:
    """One row per phase."""
    table = Table(
        "through", "requests", "hit rate", "TTFT mean / p99", "predicted exactly", title="the demo's workload"
    )
    for phase in found:
        times = f"{phase.mean_ttft_ms:,.0f} / {phase.p99_ttft_ms:,.0f} ms"
        table.add_row(phase.name, str(len(phase.outcomes)), f"{phase.hit_rate:.1%}", times, f"{phase.exact_rate:.1%}")
    return table
