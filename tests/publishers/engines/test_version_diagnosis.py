"""Versions whose events don't show what the engine holds are diagnosed until the engine is replaced."""

from kvatlas_publishers.diagnoses import Diagnoses
from kvatlas_publishers.ledger.counters import LedgerCounters
from kvatlas_publishers.version_diagnosis import VersionDiagnosis


def seen(diagnoses: Diagnoses) -> list[str]:
    return [one.seen for one in diagnoses.current]


def test_the_engines_own_word_names_the_version_and_the_least_one() -> None:
    diagnoses = Diagnoses("w")
    diagnosis = VersionDiagnosis(diagnoses)
    diagnosis.look(LedgerCounters(), "0.5.6.post2", 0)
    [found] = diagnoses.current
    assert "0.5.6.post2" in found.seen and "0.5.7" in found.cure
    diagnosis.look(LedgerCounters(), "0.5.7", 0)
    assert not diagnoses.current


def test_events_tell_the_version_of_an_engine_that_says_nothing() -> None:
    diagnoses, counters = Diagnoses("w"), LedgerCounters()
    diagnosis = VersionDiagnosis(diagnoses)
    diagnosis.look(counters, "", 0)
    assert not diagnoses.current
    counters.engine_too_old += 2
    diagnosis.look(counters, "", 0)
    assert "before 0.5.6" in seen(diagnoses)[0]
    diagnosis.look(counters, "", 0)
    assert diagnoses.current, "until the engine is another process"
    diagnosis.look(counters, "", 1)
    assert not diagnoses.current
    counters.parent_removed += 1
    diagnosis.look(counters, "", 1)
    assert "0.5.6" in seen(diagnoses)[0]
