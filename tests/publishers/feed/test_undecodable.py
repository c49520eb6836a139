import json
from pathlib import Path

from publishers.feed.dead_letters import KEPT_PAYLOAD_BYTES, DeadLetters
from publishers.feed.undecodable import PoisonAside


def test_the_engines_own_poison_is_told_by_what_follows() -> None:
    aside = PoisonAside()
    aside.put(5, b"bad", 4)
    assert aside.before(6) == [(5, b"bad")]
    assert aside.before(7) == []


def test_a_foreign_payload_that_took_a_seq_is_dropped() -> None:
    aside = PoisonAside()
    aside.put(5, b"bad", 4)
    aside.put(5, b"worse", 4)
    assert aside.before(5) == []


def test_several_in_a_row() -> None:
    aside = PoisonAside()
    aside.put(0, b"a", None)
    aside.put(1, b"b", None)
    assert aside.before(2) == [(0, b"a"), (1, b"b")]


def test_what_follows_the_first_of_several_keeps_the_first() -> None:
    aside = PoisonAside()
    aside.put(5, b"a", 4)
    aside.put(6, b"b", 4)
    assert aside.before(6) == [(5, b"a")]


def test_poison_behind_a_gap_is_left_to_the_replay() -> None:
    aside = PoisonAside()
    aside.put(9, b"a", 4)
    assert aside.before(10) == []


def test_poison_before_a_gap_is_left_to_the_replay() -> None:
    aside = PoisonAside()
    aside.put(5, b"a", 4)
    assert aside.before(9) == []


def test_dead_letters_are_kept_in_files_of_bounded_size(tmp_path: Path) -> None:
    letters = DeadLetters(tmp_path / "deep" / "w.jsonl", "w", max_bytes=40_000)
    for seq in range(100):
        assert letters.keep("why", seq, bytes(1000))
    files = sorted((tmp_path / "deep").iterdir())
    assert [file.name for file in files] == ["w.jsonl", "w.jsonl.1"]
    assert sum(file.stat().st_size for file in files) <= 40_000
    last = json.loads(files[0].read_text().splitlines()[-1])
    assert (last["worker"], last["why"], last["seq"], last["bytes"]) == ("w", "why", 99, 1000)


def test_of_a_large_payload_only_the_beginning_is_kept(tmp_path: Path) -> None:
    DeadLetters(tmp_path / "w.jsonl", "w").keep("too large", None, bytes(10_000_000))
    assert (tmp_path / "w.jsonl").stat().st_size < 2 * KEPT_PAYLOAD_BYTES


def test_a_letter_that_cannot_be_kept_is_no_error(tmp_path: Path) -> None:
    assert not DeadLetters(None, "w").keep("why", 1, b"")
    (tmp_path / "file").touch()
    assert not DeadLetters(tmp_path / "file" / "w.jsonl", "w").keep("why", 1, b"")
