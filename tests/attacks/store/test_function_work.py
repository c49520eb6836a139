"""The most that the store's functions do in one call, whatever their arguments and whatever is stored, counted in commands and
in their words. `benchmarks/security/hostile_calls.py` has the calls, and measures their time."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from benchmarks.security.hostile_calls import LONGEST_CHAIN, POOL, HostileCall, fill_store, hostile_calls
from kvatlas.embedded.valkey import ValkeyProcess

MOST_COMMANDS, MOST_WORDS = 2_000, 8_000
"""Within one call."""
MOST_ANSWER_BYTES = 4 << 20
MOST_READ_BYTES = 1 << 20
MARK = "this is the last"
PREDICTIONS = next(key for key in POOL if ":predictions" in key)


@pytest.fixture(scope="module", params=["valkey", "redis8"])
def filled(request: pytest.FixtureRequest) -> Iterator[Redis]:
    binary: Path | None = request.getfixturevalue("redis8_binary") if request.param == "redis8" else None
    with ValkeyProcess(binary=binary) as server, Redis.from_url(server.url, socket_timeout=60.0) as client:
        fill_store(client)
        yield client


def test_predictions_are_read_up_to_a_sum_of_bytes(filled: Redis) -> None:
    """A prediction of a long prompt takes as long as many of short ones."""
    calls = [call for call in hostile_calls() if "predictions" in call.act]
    for call, commands, _ in _made(filled, calls):
        read = sum(one.count(" ") - 1 for one in commands if one.startswith(f"HMGET {PREDICTIONS} "))
        assert read, "an earlier call has emptied the pool"
        assert read * (LONGEST_CHAIN * 8 if "long predictions" in call.act else 80) <= MOST_READ_BYTES, call.act


def test_one_call_does_bounded_work(filled: Redis) -> None:
    for call, commands, answer_bytes in _made(filled, hostile_calls()):
        words = sum(one.count(" ") + 1 for one in commands)
        assert len(commands) <= MOST_COMMANDS and words <= MOST_WORDS, (call.function, call.act, len(commands), words)
        assert answer_bytes <= MOST_ANSWER_BYTES, (call.function, call.act)


def _made(client: Redis, calls: Iterable[HostileCall]) -> Iterator[tuple[HostileCall, list[str], int]]:
    """Each call with the commands inside it, and the bytes of its answer."""
    with client.monitor() as monitor:  # type: ignore[no-untyped-call]
        for call in calls:
            answer_bytes = _make(client, call)
            client.echo(MARK)
            commands = []
            for one in monitor.listen():
                if MARK in one["command"]:
                    break
                if one["client_type"] == "lua":
                    commands.append(one["command"])
            yield call, commands, answer_bytes


def _make(client: Redis, call: HostileCall) -> int:
    """The bytes of its answer; 0 if it is refused."""
    try:
        return _bytes_of(client.execute_command(*call.words))  # type: ignore[no-untyped-call]
    except ResponseError as error:
        if str(error).startswith("user_function:"):
            raise  # the script failed, which proves nothing: the call was not refused
        return 0


def _bytes_of(answer: object) -> int:
    if isinstance(answer, list):
        return sum(map(_bytes_of, answer)) + len(answer)
    return len(answer) if isinstance(answer, bytes) else 8
