"""Settings that contradict what a publisher sees: logged once with the cure, and told in its heartbeats and its status."""

import logging
from collections.abc import Sequence

from kvatlas.fleet.records import MAX_DIAGNOSIS_TEXT, Diagnosis

log = logging.getLogger("kvatlas.publisher")


class Diagnoses:
    """What is wrong with one worker now, at most one diagnosis of each name."""

    def __init__(self, worker_id: str) -> None:
        self._worker_id = worker_id
        self._by_name: dict[str, Diagnosis] = {}
        self.last_unreadable = ""
        """The last line that said what of the engine's feed can't be read."""

    @property
    def current(self) -> Sequence[Diagnosis]:
        return tuple(self._by_name.values())

    def set(self, name: str, seen: str, cure: str, *, counts: bool = False) -> None:
        """This is so now; logged unless it was so before. `counts`: what is seen has numbers that change."""
        found = Diagnosis(name=name, seen=seen[:MAX_DIAGNOSIS_TEXT], cure=cure[:MAX_DIAGNOSIS_TEXT])
        before, self._by_name[name] = self._by_name.get(name), found
        if before is None or (before.cure != found.cure if counts else before != found):
            log.warning("worker %s: %s; %s", self._worker_id, found.seen, found.cure)

    def clear(self, name: str) -> None:
        """Nothing of this name is wrong now; logged if something was."""
        if (before := self._by_name.pop(name, None)) is not None:
            log.info("worker %s: no longer so: %s", self._worker_id, before.seen)
