"""Clock differences. Nothing that must be exact depends on clocks, but lags and ages are wrong by their difference."""

from collections.abc import Iterator, Mapping

from kvatlas_cli.doctor.report import Finding, Level, join_names

MAX_SKEW_US = 1_000_000
WRONG_US = 60_000_000
"""From here on a clock is simply wrong, and no figure with a time in it means anything."""
_ADVICE = "synchronise the clocks (NTP); reported lags and ages are wrong by the difference"


def judge_clocks(store_us: int | None, workers_us: Mapping[str, int], indexers_us: int) -> Iterator[Finding]:
    """How far each clock is ahead of ours. `store_us` None: unknown. `indexers_us`: at least one indexer's clock is this far
    ahead or more; 0: none is."""
    ahead = {f"worker {worker_id}": us for worker_id, us in workers_us.items()}
    if store_us is not None:
        ahead["the store"] = store_us
    ahead["an indexer"] = indexers_us
    wrong = {f"{name} {us / 1e6:+.1f} s": abs(us) for name, us in ahead.items() if abs(us) > MAX_SKEW_US}
    if wrong:
        level = Level.ERROR if max(wrong.values()) > WRONG_US else Level.WARNING
        yield Finding("clocks", level, f"clocks differ from this machine's: {join_names(wrong)}", _ADVICE)
    else:
        yield Finding("clocks", Level.OK, f"no clock differs from this machine's by more than {MAX_SKEW_US / 1e6:g} s")
