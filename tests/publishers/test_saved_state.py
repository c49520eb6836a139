"""The saved state is all or nothing, and the publisher starts whatever is on disk."""

from pathlib import Path

import pytest

from kvatlas_publishers.saved_state import SavedState, StateFile

STATE = SavedState("w1", 12 << 20, b"position", b"ledger" * 1000, 1_700_000_000_000_000, "v1", {"sql": "/a"})


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    StateFile(tmp_path / "new" / "folder", "w1").save(STATE)
    file = StateFile(tmp_path / "new" / "folder", "w1")
    assert file.load() == STATE and file.warnings == 0


def test_the_last_save_counts_and_leaves_one_file(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "w1")
    file.save(STATE)
    later = SavedState("w1", 13 << 20, b"", b"")
    file.save(later)
    assert file.load() == later
    assert list(tmp_path.iterdir()) == [file.path]


def test_a_missing_file_is_one_counted_warning(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "w1")
    assert file.load() is None
    assert file.warnings == 1 and str(file.path) in file.warning and "\n" not in file.warning


@pytest.mark.parametrize("cut", [0, 1, 10, 30, 60, 500, -1])
def test_a_torn_file_starts_empty(tmp_path: Path, cut: int) -> None:
    file = StateFile(tmp_path, "w1")
    file.save(STATE)
    file.path.write_bytes(file.path.read_bytes()[:cut])
    assert file.load() is None and file.warnings == 1 and "starting empty" in file.warning


def test_a_changed_bit_starts_empty(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "w1")
    file.save(STATE)
    content = bytearray(file.path.read_bytes())
    content[-7] ^= 1
    file.path.write_bytes(content)
    assert file.load() is None and "checksum" in file.warning


def test_a_foreign_file_starts_empty(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "w1")
    file.path.write_bytes(b"something else entirely, and long enough to be a state")
    assert file.load() is None and "not a publisher's state" in file.warning
    StateFile(tmp_path, "w2").save(SavedState("w2", 1, b"", b""))
    (tmp_path / "w2.state").rename(file.path)
    assert file.load() is None and "'w2'" in file.warning
    assert file.warnings == 2


def test_a_folder_in_place_of_the_file_starts_empty(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "w1")
    file.path.mkdir()
    assert file.load() is None and file.warnings == 1


def test_a_save_that_fails_keeps_the_old_state(tmp_path: Path) -> None:
    file = StateFile(tmp_path, "w1")
    file.save(STATE)
    file.path.with_suffix(".state.new").mkdir()  # where the new one is written
    with pytest.raises(IsADirectoryError):
        file.save(SavedState("w1", 99 << 20, b"", b""))
    assert file.load() == STATE
