"""A heap of deadlines, one for each id."""

from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

SLACK = 64

K = TypeVar("K", bound=Any)
"""A name that can be ordered."""


class Deadlines(Generic[K]):
    """When each id is due. Each id has one deadline."""

    def __init__(self) -> None:
        self._due_us: dict[K, int] = {}
        self._heap: list[tuple[int, K]] = []

    def __contains__(self, id: K) -> bool:
        return id in self._due_us

    def add(self, due_us: int, id: K) -> None:
        """Set the time at which an id is due, replacing an earlier one."""
        self._due_us[id] = due_us
        heappush(self._heap, (due_us, id))
        if len(self._heap) > 2 * len(self._due_us) + SLACK:  # discarded ids stay in the heap until they are due
            self._heap = [(due_us, id) for id, due_us in self._due_us.items()]
            heapify(self._heap)

    def discard(self, id: K) -> None:
        self._due_us.pop(id, None)

    def list_due(self, until_us: int) -> list[tuple[int, K]]:
        """(due time, id) for the ids that are due by then, earliest first."""
        return sorted((due_us, id) for id, due_us in self._due_us.items() if due_us <= until_us)

    def take_due(self, now_us: int) -> list[K]:
        """Remove and return the ids that are due by now."""
        due: list[K] = []
        while self._heap and self._heap[0][0] <= now_us:
            due_us, id = heappop(self._heap)
            if self._due_us.get(id) == due_us:
                del self._due_us[id]
                due.append(id)
        return due
