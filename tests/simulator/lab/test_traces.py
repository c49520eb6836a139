"""Traces from files: what is read, and one clear line for everything else."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvatlas.errors import InvalidValue
from kvatlas_simulator.lab.traces import read_trace


def write(folder: Path, lines: list[Any], *, zipped: bool = False) -> Path:
    text = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = folder / ("trace.jsonl.gz" if zipped else "trace.jsonl")
    file.write_bytes(gzip.compress(text) if zipped else text)
    return file


def mooncake(timestamp: float, tokens: int, output: int, ids: list[int]) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": ids}


@pytest.mark.parametrize("zipped", [False, True])
def test_mooncakes_lines_are_requests_by_arrival_with_sessions(tmp_path: Path, zipped: bool) -> None:
    lines = [
        mooncake(9_000, 1_600, 10, [1, 2, 3, 9]),
        mooncake(5_000, 1_030, 700, [1, 2, 7]),
        mooncake(6_000, 1_030, 5, [1, 5, 8]),
    ]
    workload = read_trace(write(tmp_path, lines, zipped=zipped))
    assert workload.block_tokens == 512
    assert [request.arrival_us for request in workload.requests] == [0.0, 1e6, 4e6]
    first, other, second = workload.requests
    assert first.prompt_contents(512) == (1, 2) and second.prompt_contents(512) == (1, 2, 3)
    assert len(first.contents) == 4, "two blocks of the prompt, one that it shares with the answer, one of the answer"
    assert not set(first.contents[2:]) & set(second.contents[3:]), "no answer is shared"
    assert first.session != other.session, "one shared block at the start makes no session"


def test_a_prompt_that_contains_an_earlier_one_continues_its_session(tmp_path: Path) -> None:
    lines = [mooncake(0, 1_030, 5, [1, 2, 7]), mooncake(1, 1_540, 5, [1, 2, 3, 4])]
    first, second = read_trace(write(tmp_path, lines)).requests
    assert first.session == second.session


def test_logs_of_openai_requests_share_what_their_texts_share(tmp_path: Path) -> None:
    question = {"role": "user", "content": "why is the sky blue? " * 40}
    answer = {"role": "assistant", "content": "because of Rayleigh scattering"}
    lines: list[dict[str, Any]] = [
        {"timestamp": "2026-01-01T00:00:00Z", "messages": [question], "usage": {"completion_tokens": 7}},
        {
            "timestamp": "2026-01-01T00:00:02Z",
            "messages": [question, answer],
            "max_tokens": 9,
            "user": "b",
            "model": "x",
        },
        {"timestamp": "2026-01-01T00:00:03Z", "prompt": list(range(200)), "max_tokens": 1},
    ]
    first, second, third = read_trace(write(tmp_path, lines)).requests
    shared = first.prompt_contents(64)
    assert len(shared) >= 3 and second.prompt_contents(64)[: len(shared)] == shared
    assert (first.output_tokens, second.output_tokens) == (7, 9)
    assert (second.identity.tenant, second.identity.adapter) == ("b", "x")
    assert (third.input_tokens, third.arrival_us) == (200, 3e6)


def test_a_coarse_clock_is_noticed(tmp_path: Path) -> None:
    lines = [mooncake(3_000 * tick, 600, 5, [1, 1_000 * tick + i]) for tick in range(4) for i in range(10)]
    assert read_trace(write(tmp_path, lines)).quantum_us == 3e6


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"timestamp": 0}, "line 2: "),
        (mooncake(0, 600, 5, [1]), "1 hash_ids for an input_length of 600; expected 2"),
        (mooncake(-1, 600, 5, [1, 2]), "timestamp"),
        (mooncake(0, 600, 5, [1, 1 << 40]), "hash_ids.1"),
        ("text", "line 2: "),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any, message: str) -> None:
    file = write(tmp_path, [mooncake(0, 600, 5, [1, 2]), line])
    with pytest.raises(InvalidValue, match=message) as caught:
        read_trace(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"", b"\n\n", b"\x1f\x8bnot gzip", gzip.compress(b'{"hash_ids": []}' * 999, mtime=0)[:40]],
    ids=["empty", "blank", "not gzip", "truncated"],
)
def test_an_empty_or_damaged_file_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "trace.gz"
    file.write_bytes(content)
    with pytest.raises(InvalidValue, match=str(file)):
        read_trace(file)
