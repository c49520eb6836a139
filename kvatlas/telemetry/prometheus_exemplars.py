"""Exemplars on Prometheus' page, which OpenTelemetry's exporter leaves out.

They only exist in the OpenMetrics form of the page. Prometheus requests this form, and stores the exemplars if it runs with
`--enable-feature=exemplar-storage`.
"""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar, Sample

from kvatlas.telemetry.distribution import Distribution
from kvatlas.telemetry.instruments import Instrument
from kvatlas.telemetry.metric_export import read_distributions

_SUFFIX = {"s": "_seconds", "By": "_bytes"}
"""Suffixes by unit, which the exporter appends to the names of metrics."""

Collect = Callable[[], Iterable[Metric]]


def with_exemplars(collect: Collect) -> Collect:
    """The same metrics, with the exemplars of our histograms."""

    def collect_with_exemplars() -> Iterable[Metric]:
        series = {_name_of(instrument): found for instrument, found in read_distributions().items()}
        for metric in collect():
            for attributes, distribution in series.get(metric.name, ()):
                if distribution.exemplars:
                    metric.samples = _mark(metric.samples, attributes, distribution)
            yield metric

    return collect_with_exemplars


def _name_of(instrument: Instrument) -> str:
    return instrument.name.replace(".", "_") + _SUFFIX.get(instrument.unit, "")


def _mark(samples: Iterable[Sample], attributes: Mapping[str, str], found: Distribution) -> list[Sample]:
    """Add exemplars to the buckets of one series."""
    bounds, _ = found.doublings()
    own = {name.replace(".", "_"): value for name, value in attributes.items()}
    by_bound = {bound: place for place, bound in enumerate(bounds)}
    marked = []
    for sample in samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le" and not name.startswith("otel_")}
        if sample.name.endswith("_bucket") and labels == own:
            place = by_bound.get(float(sample.labels["le"]), len(bounds))
            if (one := found.exemplars.get(place)) is not None:
                ids = {"trace_id": f"{one.trace_id:032x}", "span_id": f"{one.span_id:016x}"}
                sample = sample._replace(exemplar=Exemplar(ids, one.value, one.time_ns / 1e9))
        marked.append(sample)
    return marked
