"""Clock differences. Nothing that must be exact depends on clocks, but lags and ages are wrong by the difference."""

from collections.abc import Collection, Iterator, Mapping

from kvatlas.fleet.records import FleetRecord, Liveness
from kvatlas_cli.doctor.finding import Finding, Level, join_names

MAX_SKEW_US = 1_000_000
WRONG_US = 60_000_000
"""Above this difference, a clock is plainly wrong, and all figures that depend on it are meaningless."""
_ADVICE = "synchronize the clocks (NTP); reported lags and ages are wrong by the difference"


def judge_clocks(
    store_us: int | None,
    workers_us: Mapping[str, int],
    indexers_us: Mapping[str, int],
    routers_us: Mapping[str, int] | None = None,
) -> Iterator[Finding]:
    """How far each clock is ahead of ours. `store_us=None`: unknown."""
    ahead = {f"worker {worker_id}": us for worker_id, us in workers_us.items()}
    ahead |= {f"router {router_id}": us for router_id, us in (routers_us or {}).items()}
    if store_us is not None:
        ahead["the store"] = store_us
    ahead |= {(f"indexer {member_id}" if member_id else "an indexer"): us for member_id, us in indexers_us.items()}
    wrong = {f"{name} {_text(us)}": abs(us) for name, us in ahead.items() if abs(us) > MAX_SKEW_US}
    if wrong:
        level = Level.ERROR if max(wrong.values()) > WRONG_US else Level.WARNING
        yield Finding("clocks", level, f"clocks differ from this machine's: {join_names(wrong)}", _ADVICE)
    else:
        yield Finding("clocks", Level.OK, f"no clock differs from this machine's by more than {MAX_SKEW_US / 1e6:g} s")


def indexers_ahead(
    records: Mapping[str, FleetRecord], heard: Collection[str], owners: Mapping[str, str], now_us: int
) -> dict[str, int]:
    """How far each indexer's clock is ahead of ours (negative: behind), judging by the times at which it claims to have heard
    live workers. Leaves out clocks that may be right.

    `heard`: workers that we hear too; the owners of their partitions write their records every second. `owners`: each worker's
    indexer, if known. An unknown indexer is named ''.
    """
    ages: dict[str, list[int]] = {}
    for id, one in records.items():
        ahead = one.heard_us - now_us
        live = id in heard and one.liveness is Liveness.ALIVE and one.heard_us and id in owners
        if live or ahead > MAX_SKEW_US:
            ages.setdefault(owners.get(id, ""), []).append(ahead)
    found: dict[str, int] = {}
    for member_id, some in ages.items():
        if max(some) > MAX_SKEW_US:
            found[member_id] = max(some)
        elif min(some) < -WRONG_US:
            found[member_id] = min(some)
    return found


def _text(us: int) -> str:
    """`+90.0 s`, `-2.0 h`, `+1.0 d`."""
    for unit, size in (("d", 86_400e6), ("h", 3_600e6)):
        if abs(us) >= 0.99 * size:
            return f"{us / size:+.1f} {unit}"
    return f"{us / 1e6:+.1f} s"
