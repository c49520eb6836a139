"""CPU time of several processes over a period of time."""

from collections.abc import Mapping
from time import perf_counter

from benchmarks.process_usage import usage_of


class Stretch:
    """CPU time since it was created. `pids`: process ids by name."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._before = {name: usage_of(pid).cpu_s for name, pid in self._pids.items()}
        self._began = perf_counter()

    @property
    def seconds(self) -> float:
        return perf_counter() - self._began

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds of each process so far."""
        return {name: usage_of(pid).cpu_s - self._before[name] for name, pid in self._pids.items()}

    def share(self) -> dict[str, float]:
        """The average share of a core, by process."""
        seconds = self.seconds
        return {name: cpu_s / seconds for name, cpu_s in self.cpu_s().items()}
