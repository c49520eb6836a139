"""Settings that contradict what a publisher sees. They are logged once, together with the fix, and reported in
heartbeats and the status."""

import logging
from collections.abc import Sequence

from kvatlas.fleet.records import MAX_DIAGNOSIS_TEXT, Diagnosis

log = logging.getLogger("kvatlas.publisher")


class Diagnoses:
    """One worker's current problems, with at most one diagnosis under each name."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._by_name: dict[str, Diagnosis] = {}
        self.last_unreadable = ""
        """The last line about something unreadable in the engine's feed."""

    @property
    def current(self) -> Sequence[Diagnosis]:
        return tuple(self._by_name.values())

    def set(self, name: str, seen: str, cure: str, *, counts: bool = False) -> None:
        """Set a diagnosis, and log it if it is new. `counts`: `seen` contains numbers that change, so it is logged
        again only if the cure is new."""
        found = Diagnosis(name=name, seen=seen[:MAX_DIAGNOSIS_TEXT], cure=cure[:MAX_DIAGNOSIS_TEXT])
        before, self._by_name[name] = self._by_name.get(name), found
        if before is None or (before.cure != found.cure if counts else before != found):
            log.warning("worker %s: %s; %s", self._worker_id, found.seen, found.cure)

    def clear(self, name: str) -> None:
        """Clear a diagnosis, and log that if it was set."""
        if (before := self._by_name.pop(name, None)) is not None:
            log.info("worker %s: resolved: %s", self._worker_id, before.seen)
