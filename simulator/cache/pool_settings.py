"""When a cache reserves memory for its blocks."""

from dataclasses import dataclass

from kvatlas.errors import InvalidValue


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The default is what engines do: all of it at the start, and kept. It is accounted for, nothing else depends on it."""

    initial_blocks: int | None = None
    """Reserved at the start, at most all; None: all. More are reserved as they are needed."""
    pooling: bool = True
    """The memory of free blocks stays reserved; off: beyond the initial ones it is given back."""

    def __post_init__(self) -> None:
        if self.initial_blocks is not None and self.initial_blocks < 0:
            raise InvalidValue(f"initial_blocks is {self.initial_blocks}; expected at least 0")

    def initial(self, num_blocks: int) -> int:
        """How many of a cache's blocks are reserved at the start."""
        return num_blocks if self.initial_blocks is None else min(self.initial_blocks, num_blocks)
