"""What the store's functions do at most for one call, whatever the user who calls them brings, and whatever is stored: counted
in commands, and in the words that these have. `benchmarks/security/hostile_calls.py` has the calls, and measures their time."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from benchmarks.security.hostile_calls import HostileCall, fill_store, hostile_calls
from kvatlas.embedded.valkey import ValkeyProcess

MOST_COMMANDS, MOST_WORDS = 2_000, 8_000
"""Inside of one call."""
MOST_ANSWER_BYTES = 4 << 20
MARK = "this is the last"


@pytest.fixture(scope="module", params=["valkey", "redis8"])
def filled(request: pytest.FixtureRequest) -> Iterator[Redis]:
    binary: Path | None = request.getfixturevalue("redis8_binary") if request.param == "redis8" else None
    with ValkeyProcess(binary=binary) as server, Redis.from_url(server.url) as client:
        fill_store(client)
        yield client


def test_one_call_does_bounded_work(filled: Redis) -> None:
    with filled.monitor() as monitor:  # type: ignore[no-untyped-call]
        for call in hostile_calls():
            answer = _make(filled, call)
            filled.echo(MARK)
            commands = words = 0
            for one in monitor.listen():
                if MARK in one["command"]:
                    break
                if one["client_type"] == "lua":
                    commands += 1
                    words += one["command"].count(" ") + 1
            assert commands <= MOST_COMMANDS and words <= MOST_WORDS, (call.function, call.act, commands, words)
            assert answer <= MOST_ANSWER_BYTES, (call.function, call.act)


def _make(client: Redis, call: HostileCall) -> int:
    """The bytes of its answer."""
    try:
        return _bytes_of(client.execute_command(*call.words))  # type: ignore[no-untyped-call]
    except ResponseError:
        return 0


def _bytes_of(answer: object) -> int:
    if isinstance(answer, list):
        return sum(map(_bytes_of, answer)) + len(answer)
    return len(answer) if isinstance(answer, bytes) else 8
