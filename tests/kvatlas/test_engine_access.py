"""API keys of engines, by worker or one for all."""

from pathlib import Path

import pytest

from kvatlas.engine_access import EngineAccess
from kvatlas.errors import InvalidValue, SettingsError
from kvatlas.settings import ProxySettings

KEYS = "# of the fleet\n\nsk-all\nw1 sk-one\npod.0 sk-pod\n"


@pytest.mark.parametrize(
    ("worker_id", "key"),
    [("w1", "sk-one"), ("w1-dp3", "sk-one"), ("pod_0", "sk-pod"), ("w2", "sk-all"), ("", "sk-all"), ("w10", "sk-all")],
)
def test_a_worker_has_its_own_key_or_that_of_all(worker_id: str, key: str) -> None:
    access = EngineAccess.parse(KEYS)
    assert access.key_of(worker_id) == key
    assert access.headers_of(worker_id) == {"authorization": f"Bearer {key}"}


def test_a_worker_without_a_key_sends_none() -> None:
    assert EngineAccess.parse("w1 sk-one").headers_of("w2") == {} == EngineAccess().headers_of("w1")


def test_keys_are_never_shown() -> None:
    assert "sk-" not in repr(EngineAccess.parse(KEYS))


@pytest.mark.parametrize("text", ["sk-secret\nsk-other", "a b sk-secret", "sk-sécret", "w/1 sk-secret"])
def test_a_line_that_is_no_key_is_named_by_its_number(text: str) -> None:
    with pytest.raises(InvalidValue) as raised:
        EngineAccess.parse(text)
    assert "sk-" not in str(raised.value)


@pytest.mark.parametrize(
    ("flag", "text", "line"),
    [
        ("engine_key_file", "", "--engine-key-file: .* is empty"),
        ("engine_key_file", "a b c", "--engine-key-file is .*: line 1: expected a key"),
        ("engine_key_file", None, "--engine-key-file: can't read .*: No such file"),
        ("engine_ca_file", "no certificate", "--engine-ca-file: .* has no certificate"),
        ("engine_ca_file", None, "--engine-ca-file: .* has no certificate: No such file"),
    ],
)
def test_a_file_that_can_not_be_used_is_one_line(tmp_path: Path, flag: str, text: str | None, line: str) -> None:
    file = tmp_path / "file"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SettingsError, match=line):
        ProxySettings.load(**{flag: file})
