"""Learned rates as metrics: one series for each worker."""

from collections.abc import Mapping
from functools import partial

from kvatlas.cost.learned_rates import LearnedRates
from kvatlas.telemetry import export_metrics
from kvatlas.telemetry.metric_export import MetricSource


class RateMetrics:
    """Exports the rates of every pool until it is closed."""

    def __init__(self) -> None:
        self._rates: dict[str, Mapping[str, LearnedRates]] = {}
        self._series: dict[tuple[str, str], MetricSource] = {}

    def export(self, pool_id: str, rates: Mapping[str, LearnedRates]) -> None:
        """Export a pool's rates by worker; `rates` is read again whenever an exporter asks."""
        self._rates[pool_id] = rates
        for pool, worker_id in [key for key in self._series if key[0] == pool_id and key[1] not in rates]:
            self._series.pop((pool, worker_id)).close()
        for worker_id in rates:
            if (pool_id, worker_id) not in self._series:
                rates_of = partial(self._rates_of, pool_id, worker_id)
                self._series[pool_id, worker_id] = export_metrics(
                    "rates", rates_of, {"pool": pool_id, "worker": worker_id}
                )

    def close(self) -> None:
        """End every series."""
        for series in self._series.values():
            series.close()
        self._series.clear()

    def _rates_of(self, pool_id: str, worker_id: str) -> LearnedRates | None:
        return self._rates[pool_id].get(worker_id)
