"""How much memory a worker is taken to have if nothing reports it: a named profile, for planning and for tests.

Routers don't use it: to them 0 is unknown, and what is unknown limits nothing.
"""

from dataclasses import dataclass

from kvatlas.errors import InvalidValue

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes of a worker's device and of its host."""

    hbm_bytes: int
    cpu_bytes: int


UNKNOWN = Capacity(0, 0)
CAPACITIES = {"quillcache": Capacity(80 * GIB, 512 * GIB)}
"""By profile, as cost profiles are named."""


def capacity_of(profile: str) -> Capacity:
    """Raises InvalidValue for an unknown profile."""
    if profile not in CAPACITIES:
        raise InvalidValue(f"capacity profile {profile!r:.80}; expected one of {', '.join(CAPACITIES)}")
    return CAPACITIES[profile]
