"""Memory of processes and stores over time: samples, what grew, and a plot."""

import csv
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

MOST_GROWTH = 1.1
MOST_GROWTH_MIB = 4.0
"""Growth allowed in addition, for the allocator."""


@dataclass(frozen=True, slots=True)
class Growth:
    """The growth of one series, in MiB: the means of its second and of its last quarter."""

    name: str
    second: float
    last: float

    @property
    def is_flat(self) -> bool:
        return self.last <= self.second * MOST_GROWTH + MOST_GROWTH_MIB

    def __str__(self) -> str:
        return f"{self.name:18} {self.second:8.1f} {self.last:8.1f} MiB  {'flat' if self.is_flat else 'GROWS'}"


@dataclass(slots=True)
class MemorySamples:
    """MiB by series and time."""

    seconds: list[float] = field(default_factory=list)
    mib: dict[str, list[float]] = field(default_factory=dict)

    def add(self, at_s: float, sizes_bytes: dict[str, int]) -> None:
        """Add a sample; the series are the same each time."""
        self.seconds.append(at_s)
        for name, size in sizes_bytes.items():
            self.mib.setdefault(name, []).append(size / 2**20)

    def growths(self) -> list[Growth]:
        """The growth of each series. The first quarter does not count, because caches fill."""
        quarter = max(1, len(self.seconds) // 4)
        return [Growth(name, mean(of[quarter : 2 * quarter]), mean(of[-quarter:])) for name, of in self.mib.items()]

    def write(self, file: Path) -> None:
        with file.open("w", newline="") as out:
            rows = csv.writer(out)
            rows.writerow(["second", *self.mib])
            rows.writerows(zip(self.seconds, *self.mib.values(), strict=True))

    def plot(self, file: Path) -> None:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(10, 6), layout="constrained")
        for name, of in self.mib.items():
            axes.plot([second / 60 for second in self.seconds], of, label=name)
        axes.set(xlabel="minutes", ylabel="MiB", ylim=(0, None))
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
        figure.savefig(file, dpi=120)
        pyplot.close(figure)
