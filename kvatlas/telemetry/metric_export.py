"""Exports plain integers through OpenTelemetry's observable instruments, which read them when an exporter asks.

`histogram_export` reads distributions, because the API has no observable histogram.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from threading import Lock
from typing import Any, Self

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from kvatlas.errors import InvalidValue
from kvatlas.telemetry.distribution import Distribution
from kvatlas.telemetry.instruments import INSTRUMENTS, Instrument, Kind, Series

Provider = object | Callable[[], object | None]


class MetricSource:
    """One registered object that holds counters; `close` ends its series."""

    __slots__ = ("attributes", "group", "provider")

    def __init__(self, group: str, provider: Provider, attributes: Mapping[str, str]) -> None:
        self.group = group
        self.provider = provider
        self.attributes = attributes

    def close(self) -> None:
        """Stop exporting the object. Closing it twice is fine."""
        with _lock:
            _sources.get(self.group, {}).pop(id(self), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def current(self) -> object | None:
        return self.provider() if callable(self.provider) else self.provider


_lock = Lock()
_sources: dict[str, dict[int, MetricSource]] = {}
_created: set[str] = set()


def metrics_enabled() -> bool:
    """True if this process has a meter provider, so that exported metrics have a reader."""
    # a process without a provider gets a stand-in, whose class is not public
    return not type(metrics.get_meter_provider()).__name__.startswith(("_Proxy", "NoOp"))


def export_metrics(group: str, counters: Provider, attributes: Mapping[str, str] | None = None) -> MetricSource:
    """Export a group's integers from now on, with these attributes (for example `{"worker": "w1"}`).

    `counters`: an object with the group's fields, or a callable that returns one (None: there is nothing to export now). It is
    read only when an exporter asks, on the exporter's thread. Sources with equal attributes are summed. Costs nothing on the
    hot path, and nothing at all while metrics are off. Raises InvalidValue for an unknown group.
    """
    if group not in INSTRUMENTS:
        raise InvalidValue(f"instrument group {group!r}; expected one of {', '.join(INSTRUMENTS)}")
    source = MetricSource(group, counters, dict(attributes or {}))
    with _lock:
        _sources.setdefault(group, {})[id(source)] = source
        first = group not in _created
        _created.add(group)
    if first:
        _create_instruments(group)
    return source


def _create_instruments(group: str) -> None:
    meter = metrics.get_meter("kvatlas")
    by_instrument: dict[Instrument, list[tuple[str, Series]]] = {}
    for name, series in INSTRUMENTS[group].items():
        if series.instrument.kind is not Kind.HISTOGRAM:
            by_instrument.setdefault(series.instrument, []).append((name, series))
    for instrument, fields in by_instrument.items():
        create = meter.create_observable_counter if instrument.kind is Kind.COUNTER else meter.create_observable_gauge
        create(
            instrument.name,
            callbacks=[_callback(group, fields)],
            unit=instrument.unit,
            description=instrument.description,
        )


def _callback(group: str, fields: list[tuple[str, Series]]) -> Callable[[CallbackOptions], Iterable[Observation]]:
    readers = [(attrgetter(name), series) for name, series in fields]

    def read(_: CallbackOptions) -> Iterable[Observation]:
        with _lock:
            sources = list(_sources.get(group, {}).values())
        sums: dict[tuple[tuple[str, Any], ...], int | float] = {}
        for source in sources:
            counters = source.current()
            for read_field, series in readers:
                value = None if counters is None else read_field(counters)
                if value is not None:
                    attributes = tuple(sorted({**source.attributes, **series.attributes}.items()))
                    sums[attributes] = sums.get(attributes, 0) + value * series.factor
        return [Observation(value, dict(attributes)) for attributes, value in sums.items()]

    return read


def read_distributions() -> Mapping[Instrument, Sequence[tuple[Mapping[str, str], Distribution]]]:
    """Every distribution that is currently exported, with the attributes of its series."""
    with _lock:
        sources = [source for group in _sources.values() for source in group.values()]
    found: dict[Instrument, dict[tuple[tuple[str, str], ...], Distribution]] = {}
    for source in sources:
        counters = source.current()
        for name, series in INSTRUMENTS[source.group].items():
            if series.instrument.kind is not Kind.HISTOGRAM or counters is None:
                continue
            value: Distribution = attrgetter(name)(counters)
            by_attributes = found.setdefault(series.instrument, {})
            attributes = tuple(sorted({**source.attributes, **series.attributes}.items()))
            before = by_attributes.get(attributes)
            by_attributes[attributes] = value if before is None else before.plus(value)
    return {
        instrument: [(dict(attributes), value) for attributes, value in series.items()]
        for instrument, series in found.items()
    }
