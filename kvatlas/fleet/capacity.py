"""The memory that is assumed for a worker that reports none: a named profile, for planning and for tests.

Routers don't use it: to them, 0 means unknown, and an unknown capacity does not limit anything.
"""

from dataclasses import dataclass

from kvatlas.errors import InvalidValue

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Capacity:
    """The memory of a worker's device and of its host, in bytes."""

    hbm_bytes: int
    cpu_bytes: int


UNKNOWN = Capacity(0, 0)
CAPACITIES = {"quillcache": Capacity(80 * GIB, 512 * GIB)}
"""Capacities by profile name; the names are those of cost profiles."""


def capacity_of(profile: str) -> Capacity:
    """The capacity in this profile. Raises InvalidValue for an unknown profile."""
    if profile not in CAPACITIES:
        raise InvalidValue(f"capacity profile {profile!r:.80}; expected one of {', '.join(CAPACITIES)}")
    return CAPACITIES[profile]
