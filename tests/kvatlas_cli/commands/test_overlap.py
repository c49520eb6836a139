"""`kvatlas overlap` against a real store."""

import json
from pathlib import Path

import pytest

from tests.kvatlas_cli.conftest import TOKENS, Cli


@pytest.mark.parametrize("text", [json.dumps(TOKENS), " ".join(map(str, TOKENS)), ",\n".join(map(str, TOKENS))])
def test_tokens_are_read_from_a_file_in_any_format(cli: Cli, fleet_store_url: str, tmp_path: Path, text: str) -> None:
    (tmp_path / "tokens").write_text(text)
    done = cli("overlap", "--tokens", "tokens", "--model-id", "m", "--json", "--redis-url", fleet_store_url)
    assert (done.code, done.err) == (0, "")
    answer = json.loads(done.out)
    assert answer["input_tokens"] == 16
    assert {w["worker"]: w["resident_blocks"] for w in answer["workers"]} == {"w1": 4, "w2": 1}


def test_another_scope_has_no_overlap(cli: Cli, fleet_store_url: str) -> None:
    words = ["overlap", "--tokens", "-", "--model-id", "m", "--json", "--redis-url", fleet_store_url]
    for other in (["--tenant-id", "x"], ["--adapter-id", "x"]):
        done = cli(*words, *other, stdin=json.dumps(TOKENS))
        assert [worker["resident_blocks"] for worker in json.loads(done.out)["workers"]] == [0, 0]


@pytest.mark.parametrize("command", ["overlap", "route"])
def test_what_of_a_request_is_ignored_is_said_once(cli: Cli, fleet_store_url: str, command: str) -> None:
    hints = json.dumps({"model_id": "m", "token_ids": TOKENS, "surprise": 1})
    done = cli(command, "--hints", "-", "--redis-url", fleet_store_url, stdin=hints)
    assert done.code == 0
    assert done.err.count("unknown request field 'surprise' ignored") == 1
