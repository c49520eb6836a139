"""Defines instruments and series, and short functions to create them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric. `unit` is in UCUM, as in OpenTelemetry: `{block}`, `By`, `s`."""

    name: str
    unit: str
    description: str
    kind: Kind = Kind.COUNTER


@dataclass(frozen=True, slots=True)
class Series:
    """The exported series of one field: an instrument with attributes of its own. `factor` converts the unit of the field to
    that of the instrument."""

    instrument: Instrument
    attributes: Mapping[str, str] = field(default_factory=dict)
    factor: float = 1


def counter(name: str, unit: str, description: str) -> Instrument:
    return Instrument(f"kvatlas.{name}", unit, description)


def gauge(name: str, unit: str, description: str) -> Instrument:
    return Instrument(f"kvatlas.{name}", unit, description, Kind.GAUGE)


def histogram(name: str, unit: str, description: str) -> Instrument:
    """An instrument for a field that is a `Distribution`."""
    return Instrument(f"kvatlas.{name}", unit, description, Kind.HISTOGRAM)


def by(instrument: Instrument, attribute: str, **fields: str) -> dict[str, Series]:
    """Several fields of one instrument, which differ in the value of one attribute."""
    return {name: Series(instrument, {attribute: value}) for name, value in fields.items()}


def single(instrument: Instrument, name: str, factor: float = 1) -> dict[str, Series]:
    """The only field of an instrument, as a series."""
    return {name: Series(instrument, factor=factor)}


TIERS = ("hbm", "remote_hbm", "cpu_dram", "local_ssd", "object_store")
