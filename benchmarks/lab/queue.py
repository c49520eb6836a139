"""`python -m benchmarks.lab.queue`: one queue for all routers, against engines' queues and a queue in each router, in overload.

Two engines with 16 request slots each, which they report every second. Virtual time; a quarter of an hour on two cores.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from random import Random
from statistics import fmean
from typing import NamedTuple

from benchmarks.lab.document import to_table
from benchmarks.lab.grid import COST
from kvatlas.reservations.waiting_request import units
from kvatlas_router.admission.queue import QueueSettings
from kvatlas_simulator.engine.scheduler import SchedulerLimits
from kvatlas_simulator.lab.generated_requests import BLOCK_TOKENS, Arrivals, Generator, Text
from kvatlas_simulator.lab.policies.atlas import Atlas, AtlasSettings
from kvatlas_simulator.lab.policies.catalogue import PolicyKind
from kvatlas_simulator.lab.replay import START_US, FleetSettings, Served, replay
from kvatlas_simulator.lab.requests import Identity, LabRequest, Workload
from kvatlas_simulator.lab.summary import Objective, margin, percentile

FLEET = FleetSettings(2, 200_000, limits=SchedulerLimits(max_num_seqs=16, queue_limit=1 << 30), cost=COST)
SEEDS = 3
SECONDS, WARM_S = 45.0, 15.0
"""Arrivals last so long; the first ones find empty caches and no queue, and don't count."""
PER_S = 10.8
"""Requests of tenants that the fleet serves in a second, with full slots."""
PROMPTS = 4
OBJECTIVE = Objective()
PATIENT = QueueSettings(requests=1 << 20, tokens=1 << 50, wait_s=3_600.0)
"""No request is refused, so that all ways answer the same ones."""


class Way(NamedTuple):
    """Where requests wait. `shared`: routers know each other's bookings."""

    name: str
    queue: QueueSettings | None
    shared: bool


ENGINES = Way("engines' queues", None, True)
OWN = Way("a queue in each router", PATIENT, False)
POOL = Way("the pool's queue", PATIENT, True)
RUNS = [(ENGINES, 1), (OWN, 3), (POOL, 1), (POOL, 3), (POOL, 10)]
"""Each with this many routers. With shared bookings, engines' queues are the same for any number."""


class Tenant(NamedTuple):
    """`share`: its requests, as a multiple of what the fleet serves."""

    share: float
    weight: float = 1.0


FLOOD = "flood"
"""The tenant whose requests all arrive at one router, those of others at each in turn."""
CASES: Mapping[str, Mapping[str, Tenant]] = {
    "equal weights": {FLOOD: Tenant(0.9), "q1": Tenant(0.15), "q2": Tenant(0.15), "q3": Tenant(0.15)},
    "weights 2:1": {"heavy": Tenant(0.9, 2.0), FLOOD: Tenant(0.9), "q1": Tenant(0.1)},
}


def tenants_workload(case: str, seed: int) -> Workload:
    """Questions after one of each tenant's prompts, as Poisson processes."""
    tenants, rng = CASES[case], Random(f"{case} {seed}")
    made = Generator(rng, Arrivals.POISSON, 0, SECONDS)
    prompts = {name: [made.part(500, 3_000) for _ in range(PROMPTS)] for name in tenants}
    at_s, shares = 0.0, [tenant.share for tenant in tenants.values()]
    while (at_s := at_s + rng.expovariate(PER_S * sum(shares))) < SECONDS:
        (name,) = rng.choices(list(tenants), shares)
        text = Text((rng.choice(prompts[name]),)).then(*made.part(50, 1_000))
        made.ask(text, made.part(50, 300), len(made.requests), at_s, Identity(None, name))
    requests = [
        replace(
            one,
            weight=tenants[one.identity.tenant].weight,
            router=0 if one.identity.tenant == FLOOD else None,
        )
        for one in made.requests
    ]
    return Workload(case, BLOCK_TOKENS, requests)


AGENTS_PER_S = 3.0
"""Somewhat more agents than the fleet serves."""
STEPS, PAUSE_S = (4, 12), 1.0
TOOLS = 3


def agents_workload(seed: int, *, named: bool) -> Workload:
    """Agents whose next call comes a while after the last one's end. `named`: the queue knows which calls are of one agent."""
    rng = Random(f"agents {seed}")
    made = Generator(rng, Arrivals.POISSON, 0, SECONDS)
    tools = [made.part(2_000, 6_000) for _ in range(TOOLS)]
    requests: list[LabRequest] = []
    at_s, agent = 0.0, 0
    while (at_s := at_s + rng.expovariate(AGENTS_PER_S)) < SECONDS:
        text, first = Text((rng.choice(tools),)).then(*made.part(100, 2_000)), True
        for _ in range(rng.randint(*STEPS)):
            text, _ = made.ask(text, made.part(20, 200), agent, at_s, Identity())
            one = made.requests[-1]
            text = text.then(*made.part(50, 2_000))
            if not first:
                one = replace(one, arrival_us=rng.expovariate(1 / PAUSE_S) * 1e6, after=one.number - 1)
            requests.append(one if named else replace(one, session=one.number))
            first = False
        agent += 1
    return Workload("agents", BLOCK_TOKENS, requests)


def serve(workload: Workload, way: Way, routers: int, seed: int) -> Sequence[Served]:
    """What each request's client saw."""
    settings = AtlasSettings(replicas=routers, shared=way.shared, slots=True, queue=way.queue)
    policy = PolicyKind(
        way.name, lambda fleet: Atlas(fleet.engines, fleet.index, fleet.cost, settings), uses_events=True
    )
    outcome = replay(workload, policy, FLEET, seed)
    assert not outcome.refused
    return outcome.served


FROM_US, UNTIL_US = START_US + WARM_S * 1e6, START_US + SECONDS * 1e6

Figures = Mapping[str, float]
"""Figures of one replay, by title."""


def see_tenants(case: str, way: Way, routers: int, seed: int) -> Figures:
    """Times to the first token in ms, shares of the service that ended until the last arrival, and good requests per second."""
    workload = tenants_workload(case, seed)
    served = serve(workload, way, routers, seed)
    names = [request.identity.tenant for request in workload.requests]
    counted = [one for one in served if FROM_US <= one.arrived_us < UNTIL_US]
    service = dict.fromkeys(CASES[case], 0)
    for one in served:
        if FROM_US <= one.ended_us < UNTIL_US:
            uncached = one.input_tokens - one.cached_tokens
            service[names[one.number]] += units(uncached, one.cached_tokens, one.output_tokens)
    found: dict[str, float] = {}
    for group in dict.fromkeys(map(group_of, CASES[case])):
        times = sorted(one.ttft_us / 1e3 for one in counted if group_of(names[one.number]) == group)
        found[f"{group}: mean TTFT, ms"], found[f"{group}: p99, ms"] = fmean(times), percentile(times, 0.99)
    for group in dict.fromkeys(map(group_of, CASES[case])):
        mine = sum(taken for name, taken in service.items() if group_of(name) == group)
        found[f"{group}: share"] = 100 * mine / sum(service.values())
    found["good/s"] = sum(map(is_good, counted)) / (SECONDS - WARM_S)
    found["served/s"] = sum(FROM_US <= one.ended_us < UNTIL_US for one in served) / (SECONDS - WARM_S)
    return found


def group_of(tenant: str) -> str:
    """Tenants with little load are one group."""
    return "quiet" if tenant.startswith("q") else tenant


def is_good(one: Served) -> bool:
    return one.ttft_us <= OBJECTIVE.ttft_ms * 1e3 and one.tpot_us <= OBJECTIVE.tpot_ms * 1e3


def see_agents(way: Way, seed: int, *, named: bool) -> Figures:
    """Times in seconds of whole agents that began in the counted time, and of their first tokens; calls per second."""
    workload = agents_workload(seed, named=named)
    served = serve(workload, way, 3, seed)
    agents: list[list[Served]] = []
    for request, one in zip(workload.requests, served, strict=True):
        if request.after is None:
            agents.append([])
        agents[-1].append(one)
    counted = [calls for calls in agents if FROM_US <= calls[0].arrived_us < UNTIL_US]
    whole = sorted((calls[-1].ended_us - calls[0].arrived_us) / 1e6 for calls in counted)
    later = sorted(one.ttft_us / 1e6 for calls in counted for one in calls[1:])
    return {
        "whole agent, mean s": fmean(whole),
        "p99 s": percentile(whole, 0.99),
        "first call, mean TTFT s": fmean(calls[0].ttft_us / 1e6 for calls in counted),
        "later calls, mean TTFT s": fmean(later),
        "p99 TTFT s": percentile(later, 0.99),
        "served/s": sum(FROM_US <= one.ended_us < UNTIL_US for one in served) / (SECONDS - WARM_S),
    }


def tabulate(rows: Mapping[str, Sequence[Figures]]) -> str:
    """One line for each name: means with half of their 95% intervals."""
    titles = list(next(iter(rows.values()))[0])
    cells = [[name, *(_cell([one[title] for one in seen]) for title in titles)] for name, seen in rows.items()]
    return to_table(("", *titles), cells)


def _cell(values: Sequence[float]) -> str:
    digits = 0 if fmean(values) >= 100 else 1
    return f"{fmean(values):,.{digits}f} ± {margin(values):,.{digits}f}"


def main() -> None:
    """Replay every case, and print a table of each."""
    tables: dict[str, dict[str, Callable[[int], Figures]]] = {
        case: {f"{way.name}, {routers}": partial(see_tenants, case, way, routers) for way, routers in RUNS}
        for case in CASES
    }
    tables["agents"] = {
        "engines' queues": partial(see_agents, ENGINES, named=True),
        "the pool's queue, agents unknown": partial(see_agents, POOL, named=False),
        "the pool's queue": partial(see_agents, POOL, named=True),
    }
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for title, rows in tables.items():
            waiting = {name: [pool.submit(see, seed) for seed in range(SEEDS)] for name, see in rows.items()}
            print(f"\n{title}\n")
            print(tabulate({name: [one.result() for one in seen] for name, seen in waiting.items()}), flush=True)


if __name__ == "__main__":
    main()
