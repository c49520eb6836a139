"""Gauges of every process: its descriptors, and how long its certificates will be valid."""

from dataclasses import dataclass

from kvatlas.runtime.certificate_files import DAY_S, certificates_in_use
from kvatlas.runtime.descriptors import count_descriptors


@dataclass(frozen=True, slots=True)
class ProcessGauges:
    """`certificate_s`: the number of seconds until the first certificate expires, in use or on disk; None if there are none."""

    descriptors_open: int
    descriptors_most: int
    certificate_s: float | None


def process_gauges() -> ProcessGauges:
    """The current values."""
    descriptors = count_descriptors()
    days = [one[name] for one in certificates_in_use() for name in ("in_use_days", "on_disk_days")]
    left = [one * DAY_S for one in days if one is not None]
    return ProcessGauges(descriptors.open, descriptors.most, min(left, default=None))
