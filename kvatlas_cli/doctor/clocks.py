"""Whose clocks differ. Nothing that must be right hangs on clocks; lags and ages are told wrong where they differ."""

from collections.abc import Iterator, Mapping

from kvatlas_cli.doctor.finding import Finding, Level, listed

MOST_SKEW_US = 1_000_000
_ADVICE = "keep clocks in step (NTP); lags and ages are told wrong by as much"


def judge_clocks(store_us: int | None, workers_us: Mapping[str, int], indexers_us: int) -> Iterator[Finding]:
    """How far each clock is ahead of ours. `store_us` None: not asked. `indexers_us`: at least so far ahead is one of the
    indexers' clocks, 0 for not at all."""
    ahead = {f"worker {worker_id}": us for worker_id, us in workers_us.items()}
    if store_us is not None:
        ahead["the store"] = store_us
    ahead["an indexer"] = indexers_us
    wrong = [f"{name} {us / 1e6:+.1f} s" for name, us in ahead.items() if abs(us) > MOST_SKEW_US]
    if wrong:
        yield Finding("clocks", Level.WARNING, f"clocks differ from this machine's: {listed(wrong)}", _ADVICE)
    else:
        yield Finding("clocks", Level.OK, f"no clock differs from this machine's by more than {MOST_SKEW_US / 1e6:g} s")
