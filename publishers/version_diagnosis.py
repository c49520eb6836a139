"""Diagnoses engine versions whose events don't show which blocks they hold: SGLang before 0.5.7, recognized by its reported
version or by its events (`kvatlas_publishers.engines.sglang`)."""

from kvatlas_publishers.diagnoses import Diagnoses
from kvatlas_publishers.engines.sglang import LEAST_VERSION, is_too_old
from kvatlas_publishers.ledger.counters import LedgerCounters

NAME = "engine_version"
_CURE = f"upgrade SGLang to {'.'.join(map(str, LEAST_VERSION))} or later"


class VersionDiagnosis:
    """Sets and clears one diagnosis. Call `look` after each fold."""

    def __init__(self, diagnoses: Diagnoses) -> None:
        self._diagnoses = diagnoses
        self._seen = (0, 0)
        self._restarts: int | None = None
        """Number of times the feed had restarted when the diagnosis was set; None: it is not set."""

    def look(self, counters: LedgerCounters, version: str, feed_restarts: int) -> None:
        """Set or clear the diagnosis. `version`: SGLang's, as the engine reports it; empty: unknown. `feed_restarts`: number
        of times that the engine's process was replaced."""
        before, self._seen = self._seen, (counters.engine_too_old, counters.parent_removed)
        if version and is_too_old(version):
            seen = f"the engine is SGLang {version}, whose events don't show which blocks it holds"
        elif self._seen[0] > before[0]:
            seen = "the events are from SGLang before 0.5.6: they don't say where in a prompt a block is, so none is published"
        elif self._seen[1] > before[1]:
            seen = "the events are from SGLang 0.5.6: it reports removals of blocks that it still holds, so less is published"
        else:
            if self._restarts is not None and (version or feed_restarts > self._restarts):
                self._restarts = None
                self._diagnoses.clear(NAME)
            return
        self._restarts = feed_restarts
        self._diagnoses.set(NAME, seen, _CURE)
