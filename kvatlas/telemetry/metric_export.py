"""Reads plain integers into OpenTelemetry's observable instruments, when an exporter asks."""

from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from threading import Lock
from typing import Any, Self

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions
from opentelemetry.metrics import Observation as Measurement

from kvatlas.errors import InvalidValue
from kvatlas.telemetry.instruments import INSTRUMENTS, Instrument, Kind, Series

Provider = object | Callable[[], object | None]


class MetricSource:
    """One registered source of integers; `close` ends its series."""

    __slots__ = ("attributes", "group", "provider")

    def __init__(self, group: str, provider: Provider, attributes: Mapping[str, str]) -> None:
        self.group = group
        self.provider = provider
        self.attributes = attributes

    def close(self) -> None:
        """Stop reading it. Closing twice is fine."""
        with _lock:
            _observed.get(self.group, {}).pop(id(self), None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def current(self) -> object | None:
        """The counters as they are now."""
        return self.provider() if callable(self.provider) else self.provider


_lock = Lock()
_observed: dict[str, dict[int, MetricSource]] = {}
_created: set[str] = set()


def metrics_enabled() -> bool:
    """Has this process a meter provider, so that somebody may read what is observed?"""
    # a process without one is given a stand-in, whose class is not public
    return not type(metrics.get_meter_provider()).__name__.startswith(("_Proxy", "NoOp"))


def export_metrics(group: str, counters: Provider, attributes: Mapping[str, str] | None = None) -> MetricSource:
    """Export a group's integers from now on, with these attributes (for example `{"worker": "w1"}`).

    `counters`: an object with the group's fields, or a callable that gives one (or None for nothing now). It is read
    only when an exporter asks, from the exporter's thread. Sources with equal attributes are added up. Costs nothing on
    the hot path, and nothing at all while metrics are off. Raises InvalidValue for an unknown group.
    """
    if group not in INSTRUMENTS:
        raise InvalidValue(f"instrument group {group!r}; expected one of {', '.join(INSTRUMENTS)}")
    observation = MetricSource(group, counters, dict(attributes or {}))
    with _lock:
        _observed.setdefault(group, {})[id(observation)] = observation
        first = group not in _created
        _created.add(group)
    if first:
        _create(group)
    return observation


def _create(group: str) -> None:
    meter = metrics.get_meter("kvatlas")
    by_instrument: dict[Instrument, list[tuple[str, Series]]] = {}
    for name, reading in INSTRUMENTS[group].items():
        by_instrument.setdefault(reading.instrument, []).append((name, reading))
    for instrument, readings in by_instrument.items():
        create = meter.create_observable_counter if instrument.kind is Kind.COUNTER else meter.create_observable_gauge
        create(
            instrument.name,
            callbacks=[_callback(group, readings)],
            unit=instrument.unit,
            description=instrument.description,
        )


def _callback(group: str, readings: list[tuple[str, Series]]) -> Callable[[CallbackOptions], Iterable[Measurement]]:
    fields = {name: attrgetter(name) for name, _ in readings}

    def read(_: CallbackOptions) -> Iterable[Measurement]:
        with _lock:
            observations = list(_observed.get(group, {}).values())
        sums: dict[tuple[tuple[str, Any], ...], int | float] = {}
        for observation in observations:
            counters = observation.current()
            for name, reading in readings:
                value = None if counters is None else fields[name](counters)
                if value is not None:
                    attributes = tuple(sorted({**observation.attributes, **reading.attributes}.items()))
                    sums[attributes] = sums.get(attributes, 0) + value
        return [Measurement(value, dict(attributes)) for attributes, value in sums.items()]

    return read
