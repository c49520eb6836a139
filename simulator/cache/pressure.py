"""Memory pressure: a level that depends on the share of blocks that sequences hold."""

from dataclasses import dataclass
from enum import IntEnum

from kvatlas.errors import InvalidValue


class MemoryPressure(IntEnum):
    """Levels of pressure, which are ordered: `pressure >= MemoryPressure.HIGH`."""

    LOW = 0
    MEDIUM = 1
    HIGH = 2
    CRITICAL = 3

    @property
    def label(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class PressureThresholds:
    """The utilization (0..1) from which each level applies; below `medium`, the pressure is low."""

    medium: float = 0.6
    high: float = 0.8
    critical: float = 0.95

    def __post_init__(self) -> None:
        if not 0 < self.medium <= self.high <= self.critical <= 1:
            raise InvalidValue(
                f"thresholds are {self.medium}, {self.high}, {self.critical}; expected 0 < medium <= high <= critical <= 1"
            )

    def level(self, utilisation: float) -> MemoryPressure:
        """The level at this utilization (0..1)."""
        return MemoryPressure(
            (utilisation >= self.medium) + (utilisation >= self.high) + (utilisation >= self.critical)
        )
