"""The one table: kvatlas against every rival, on every workload, from a quiet fleet to an overloaded one.

The load of a workload is relative to what LMetric, the strongest policy without events, can bear: at load 1, 90% of its
requests are good. Each case is replayed with several seeds, each with its own requests, none of which was used to choose a
factor of the cost. kvatlas wins (or loses) a figure if, compared seed by seed with the best rival of that case, it is better
(worse) beyond the 95% interval of the mean difference; otherwise they tie.
"""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from benchmarks.lab.document import to_table
from kvatlas.blocks.kv_cache_groups import AttentionKind
from kvatlas_simulator.engine.step_cost import StepCost
from kvatlas_simulator.hybrid_cache.groups import CacheGroup
from kvatlas_simulator.lab.cache_layout import CacheLayout
from kvatlas_simulator.lab.generated_requests import WORKLOADS, generate
from kvatlas_simulator.lab.replay import FleetSettings, Outage, replay
from kvatlas_simulator.lab.requests import Workload
from kvatlas_simulator.lab.summary import Figures, Objective, margin
from kvatlas_simulator.lab.traces import read_trace

WORKERS = 4
COST = StepCost(90.0, 14_000.0, 80.0, 0.027, 55.0, attention_us_per_token_pair=0.0016, overhead_us=1_500.0)
"""A 70-billion-parameter model with grouped-query attention (80 layers, hidden size 8,192, 16 bit) on four accelerators of 400
TFLOP/s and 3 TB/s in practice: a prompt token takes 140 GFLOP, a pair of attended tokens 4 x 8,192 x 80 FLOP; a step reads 140
GB of weights and takes the host 1.5 ms; a token's KV is 320 KiB. kvatlas begins with the rates of a smaller model, and
learns."""
FLEET = FleetSettings(WORKERS, 200_000, cost=COST)
LOADS = (0.3, 0.9, 1.3)
BUSY_LOADS = LOADS[1:]
GOOD_SHARE = 0.9
SEARCHED = (0.2, 40.0)
"""The multiples of a workload's own rate between which load 1 is searched for."""
SEARCHES = 6
FIRST_SEED = 100
"""Smaller seeds were used to choose the factors of the cost."""
OUR = "kvatlas"
PRIORITY = "kvatlas-engine-priority"
TERMS = (
    "kvatlas-no-again", "kvatlas-no-interference", "kvatlas-no-prefixes-in-flight", "kvatlas-no-reservations",
    "kvatlas-no-learned-rates", "kvatlas-true-rates", "kvatlas-slo-penalty", PRIORITY,
)  # fmt: skip
"""kvatlas without one of its parts, with true values for its estimates, or with an option on."""
RIVALS = ("sglang-router", "inference-extension", "llm-d", "prefix-tokens", "lmetric")
OTHERS = ("round-robin", "least-loaded", "session", "least-prefill-tokens", "oracle")
"""Policies of the full study only: weaker than the rivals, and the oracle, which takes as long as all the others."""


@dataclass(frozen=True, slots=True)
class Case:
    """A workload on a fleet. `workload`: a generated one, or a trace's file. `longer`: factor on the number of requests, so
    that arrivals last longer than the longest answers. Otherwise, the end of the last answers would decide the worker-hours,
    and a multiple of the rate would be no load."""

    name: str
    workload: str
    fleet: FleetSettings = FLEET
    longer: int = 1


_ROLLING = tuple(Outage(n, 0.2 + 0.2 * n, 0.25 + 0.2 * n, 0.3 + 0.2 * n) for n in range(WORKERS))
_HYBRID = CacheLayout((CacheGroup(AttentionKind.FULL), CacheGroup(AttentionKind.SLIDING_WINDOW, 1_024)))
CASES = (
    Case("chats", "chat"),
    Case("chats, users away for minutes", "idle"),
    Case("agents with tools", "agents"),
    Case("agents, bursty", "agents-bursty"),
    Case("questions on documents", "rag"),
    Case("tenants with adapters", "tenants"),
    Case("200 tenants, heavy tails", "tails", longer=3),
    Case("bursts on new prefixes", "bursts", longer=2),
    Case("long answers", "thought", longer=3),
    Case("chats with giants, 8 workers", "giants", replace(FLEET, workers=8), longer=3),
    Case("agents, rolling restart", "agents", replace(FLEET, outages=_ROLLING)),
    Case("agents, the busiest worker is lost", "agents", replace(FLEET, outages=(Outage(None, 0.5, 0.5, 0.9),))),
    Case("agents, hybrid model", "agents", replace(FLEET, layout=_HYBRID)),
)


class Aim(NamedTuple):
    """A figure to compare. `sign`: 1 if less is better."""

    field: str
    title: str
    sign: int
    form: str


AIMS = (
    Aim("ttft_mean_ms", "mean TTFT, ms", 1, ",.0f"),
    Aim("ttft_p99_ms", "p99 TTFT, ms", 1, ",.0f"),
    Aim("tpot_mean_ms", "mean TPOT, ms", 1, ",.1f"),
    Aim("answer_mean_ms", "whole answer, ms", 1, ",.0f"),
    Aim("good", "good requests", -1, ".1%"),
    Aim("worker_hours", "worker-hours", 1, ".3f"),
)


class Run(NamedTuple):
    """One replay: this many `requests` of a case's workload, at this load; at load 1, it runs at this `speed`."""

    case: str
    load: float
    policy: str
    seed: int
    requests: int
    speed: float


Results = Mapping[tuple[str, float, str], Sequence[Figures]]
"""The figures of each seed, by case, load and policy."""


def cases_of(traces: Iterable[str]) -> tuple[Case, ...]:
    """The generated cases, and one for each trace, whose engines have larger caches, for its longer prompts."""
    return (
        *CASES,
        *(Case(Path(one).name.partition("_")[0], one, replace(FLEET, cache_tokens=500_000)) for one in traces),
    )


def run_grid(
    cases: Sequence[Case],
    policies: Sequence[str],
    loads: Sequence[float],
    seeds: int,
    requests: int,
    python: str,
    jobs: int,
    kept: Path | None,
) -> Results:
    """Replay every case. `python`: the interpreter with Dynamo. `kept`: a file for the figures, so an interrupted study can
    continue."""
    known: dict[Run, Figures] = {}
    if kept is not None and kept.exists():
        for line in kept.read_text().splitlines():
            run, figures = json.loads(line)
            known[Run(*run)] = Figures(**figures)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        speeds = list(pool.map(partial(_full_speed, requests=requests), cases))
        runs = [
            Run(case.name, load, policy, seed, requests, speed)
            for seed in range(
                FIRST_SEED, FIRST_SEED + seeds
            )  # first, so that the seeds of an interrupted study are whole
            for case, speed in zip(cases, speeds, strict=True)
            for load in loads
            for policy in policies
        ]
        missing = [run for run in runs if run not in known]
        by_name = {case.name: case for case in cases}
        fleets = [
            replace(by_name[run.case], fleet=replace(by_name[run.case].fleet, dynamo_python=python)) for run in missing
        ]
        for run, figures in zip(missing, pool.map(_replay, fleets, missing, chunksize=len(policies)), strict=True):
            known[run] = figures
            if kept is not None:
                with kept.open("a") as file:
                    file.write(json.dumps([run, asdict(figures)]) + "\n")
    found: dict[tuple[str, float, str], list[Figures]] = {}
    for run in runs:
        found.setdefault((run.case, run.load, run.policy), []).append(known[run])
    return found


def _full_speed(case: Case, requests: int) -> float:
    """The speed at which LMetric still serves 90% of the requests well, by bisection of its logarithm. If that is the highest
    one, all requests arrive before many answers have ended, so that no load is quiet or busy; a message says so."""
    low, high = SEARCHED
    for _ in range(SEARCHES):
        middle = (low * high) ** 0.5
        figures = _replay(case, Run(case.name, 1.0, "lmetric", 0, requests, middle))
        low, high = (middle, high) if figures.good >= GOOD_SHARE else (low, middle)
    if high == SEARCHED[1]:
        print(f"{case.name}: {requests} requests are too few to overload this fleet at any rate", file=sys.stderr)
    return low


def _replay(case: Case, run: Run) -> Figures:
    requests = run.requests * case.longer
    workload = _load(case.workload, requests, run.seed)
    outcome = replay(workload, run.policy, case.fleet, run.seed, speed=run.load * run.speed)
    return Figures.of(outcome, Objective(), skipped=requests // 4)


@lru_cache(maxsize=2)
def _load(name: str, requests: int, seed: int) -> Workload:
    if name in WORKLOADS:
        return generate(name, seed, requests)
    workload = read_trace(Path(name))
    return replace(workload, requests=workload.requests[:requests])


class Verdict(NamedTuple):
    """kvatlas compared with one rival in one figure: the `gain` as a share of the rival's value, and whether it is certain."""

    rival: str
    gain: float
    certain: bool

    @property
    def word(self) -> str:
        return "tie" if not self.certain else "win" if self.gain > 0 else "loss"


def compare_with(results: Results, case: str, load: float, rival: str, aim: Aim, our: str = OUR) -> Verdict:
    """Compare seed by seed."""
    ours, theirs = ([float(getattr(one, aim.field)) for one in results[case, load, name]] for name in (our, rival))
    gains = [aim.sign * (their - mine) for mine, their in zip(ours, theirs, strict=True)]
    mean, base = fmean(gains), abs(fmean(theirs))
    return Verdict(rival, mean / base if base else 0.0, abs(mean) > margin(gains))


def best_rival(results: Results, case: str, load: float, aim: Aim) -> str:
    """The rival with the best mean."""
    rivals = [
        name
        for a_case, a_load, name in results
        if (a_case, a_load) == (case, load) and name != "oracle" and not name.startswith(OUR)
    ]
    return min(rivals, key=lambda name: aim.sign * fmean(getattr(one, aim.field) for one in results[case, load, name]))


def to_markdown(results: Results, command: str, seeds: int, requests: int) -> str:
    """The chapter: the table against the best rival of each case, then wins and losses against each rival."""
    places = list(dict.fromkeys((case, load) for case, load, _ in results))
    shown: Callable[[tuple[str, float], Aim], str] = partial(_cell, results)
    table = to_table(
        ["workload", "load", *(aim.title for aim in AIMS)],
        [[case, f"{load:g}", *(shown((case, load), aim) for aim in AIMS)] for case, load in places],
    )
    return "\n".join(
        [
            "## Every policy on every workload",
            f"{WORKERS} engines with attention's quadratic term, step overhead and preemption; {requests} requests or more, "
            f"the first quarter of which only warms the caches; {seeds} seeds, each with its own requests, none of which was "
            "used to tune the cost. At load 1, 90% of the requests are good under `lmetric` (first token within 2 s, 100 ms "
            "for each later one). Each cell shows kvatlas' figure, then how much better or worse it is than the best rival's. "
            "A win or a loss, shown with the rival's name, is a difference beyond its 95% interval, compared seed by seed; "
            "everything else is a tie, in parentheses.",
            "", "```", command, "```", "", table, "",
            "**Against each rival**: wins/ties/losses in the rows above, and kvatlas' mean gain.",
            "", _rivals_table(results, places), "",
        ]
    )  # fmt: skip


def _cell(results: Results, place: tuple[str, float], aim: Aim) -> str:
    mine = fmean(getattr(one, aim.field) for one in results[*place, OUR])
    verdict = compare_with(results, *place, best_rival(results, *place, aim), aim)
    shown, gain = f"{mine:{aim.form}}", f"{verdict.gain:+.0%}"
    match verdict.word:
        case "tie":
            return f"{shown} ({gain})"
        case "win":
            return f"{shown}: win {gain}, {verdict.rival}"
        case _:
            return f"{shown}: **loss** {gain}, {verdict.rival}"


def _rivals_table(results: Results, places: Sequence[tuple[str, float]]) -> str:
    names = [name for name in dict.fromkeys(name for _, _, name in results) if name != OUR]
    rows = []
    for name in names:
        row = [name]
        for aim in AIMS:
            verdicts = [
                compare_with(results, case, load, name, aim) for case, load in places if (case, load, name) in results
            ]
            words = [verdict.word for verdict in verdicts]
            count = "/".join(str(words.count(word)) for word in ("win", "tie", "loss"))
            row.append(f"{count}, {fmean(verdict.gain for verdict in verdicts):+.0%}")
        rows.append(row)
    return to_table(["rival", *(aim.title for aim in AIMS)], rows)


def _priority_table(results: Results, places: Sequence[tuple[str, float]]) -> str:
    """`--engine-priority` over all workloads: relative changes of means, and that of the workload that loses most."""
    columns = (*AIMS[:2], Aim("ttft_longest_ms", "longest TTFT", 1, ""), *AIMS[3:5])
    rows = []
    for load in dict.fromkeys(load for _, load in places):
        row = [f"{load:g}"]
        for aim in columns:
            gains = {
                case: compare_with(results, case, load, OUR, aim, PRIORITY).gain for case, at in places if at == load
            }
            worst = min(gains, key=lambda case: gains[case])
            row.append(f"{-aim.sign * fmean(gains.values()):+.0%} ({worst}: {-aim.sign * gains[worst]:+.0%})")
        rows.append(row)
    return to_table(["load", *(aim.title.removesuffix(", ms") for aim in columns)], rows)


def terms_to_markdown(results: Results, command: str, seeds: int, requests: int) -> str:
    """The chapter on the cost's terms."""
    places = list(dict.fromkeys((case, load) for case, load, _ in results))
    return "\n".join(
        [
            "## Cost terms",
            f"kvatlas against itself without one of its parts, or with another one: wins/ties/losses of the default in "
            f"{len(places)} cases ({', '.join(f'{load:g}' for load in BUSY_LOADS)} x full load), and its mean gain. {requests} "
            f"requests, {seeds} seeds.",
            "", "```", command, "```", "", _rivals_table(results, places), "",
            "With `--engine-priority`, the mean change over all workloads, and that of the workload that fares worst:",
            "", _priority_table(results, places), "",
        ]
    )  # fmt: skip
