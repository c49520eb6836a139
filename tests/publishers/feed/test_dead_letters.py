import json
from pathlib import Path

from kvatlas_publishers.feed.dead_letters import KEPT_PAYLOAD_BYTES, DeadLetters


def test_dead_letters_are_kept_in_files_of_bounded_size(tmp_path: Path) -> None:
    letters = DeadLetters(tmp_path / "deep", "w", max_bytes=40_000)
    for seq in range(100):
        assert letters.keep("why", seq, bytes(1000))
    files = sorted((tmp_path / "deep").iterdir())
    assert [file.name for file in files] == ["w.dead-letters.jsonl", "w.dead-letters.jsonl.1"]
    assert sum(file.stat().st_size for file in files) <= 40_000
    last = json.loads(files[0].read_text().splitlines()[-1])
    assert (last["worker"], last["why"], last["seq"], last["bytes"]) == ("w", "why", 99, 1000)


def test_only_the_beginning_of_a_large_payload_is_kept(tmp_path: Path) -> None:
    DeadLetters(tmp_path, "w").keep("too large", None, bytes(10_000_000))
    assert (tmp_path / "w.dead-letters.jsonl").stat().st_size < 2 * KEPT_PAYLOAD_BYTES


def test_a_letter_that_cannot_be_kept_is_no_error(tmp_path: Path) -> None:
    assert not DeadLetters(None, "w").keep("why", 1, b"")
    (tmp_path / "file").touch()
    assert not DeadLetters(tmp_path / "file", "w").keep("why", 1, b"")
