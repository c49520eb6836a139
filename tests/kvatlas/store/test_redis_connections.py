"""Many concurrent calls over few connections: each gets its own answer, even if others go wrong."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hiredis import pack_command
from redis.exceptions import ResponseError

from kvatlas.embedded.valkey import ValkeyProcess
from kvatlas.errors import Unreachable
from kvatlas.store import connection
from kvatlas.store.connection import Store, open_store
from kvatlas.store.redis_connections import MOST_CONNECTIONS, pack
from tests.eventually import until

pytestmark = pytest.mark.anyio

LIBRARY = """#!lua name=echoes
redis.register_function{
  function_name = 'echo', flags = { 'no-writes' },
  callback = function(keys, args) return args[1] end
}
redis.register_function{
  function_name = 'refuse', flags = { 'no-writes' },
  callback = function() return redis.error_reply('ERR it is refused') end
}
redis.register_function('add', function(keys, args) return redis.call('INCRBY', keys[1], args[1]) end)
"""


@pytest.fixture
async def store(valkey_url: str) -> AsyncIterator[Store]:
    opened = await open_store(valkey_url, wait=False)
    try:
        await opened.client.flushall()
        await opened.load_functions(LIBRARY)
        yield opened
    finally:
        await opened.client.execute_command("FUNCTION DELETE", "echoes")
        await opened.close()


async def clients_of(store: Store) -> int:
    return len(await store.client.client_list())


async def echo(store: Store, text: str) -> str:
    answer: bytes = await store.fcall_ro("echo", ["k"], [text])
    return answer.decode()


async def test_a_thousand_calls_at_a_time_each_get_their_own_answer_over_few_connections(store: Store) -> None:
    before = await clients_of(store)
    texts = [str(number) * (number % 50 + 1) for number in range(1_000)]
    assert await asyncio.gather(*(echo(store, text) for text in texts)) == texts
    assert await clients_of(store) - before <= MOST_CONNECTIONS


async def test_long_requests_and_answers_pass(store: Store) -> None:
    texts = [chr(97 + number) * 3_000_000 for number in range(5)]
    assert await asyncio.gather(*(echo(store, text) for text in texts)) == texts


async def test_what_the_server_refuses_fails_alone(store: Store) -> None:
    results = await asyncio.gather(
        echo(store, "a"), store.fcall_ro("refuse", ["k"], []), echo(store, "b"), return_exceptions=True
    )
    assert (results[0], results[2]) == ("a", "b")
    assert isinstance(results[1], ResponseError) and "it is refused" in str(results[1])
    several = store.fcall_ro_many("echo", [(["k"], ["x"]), (["k"], ["y"])])
    assert await several == [b"x", b"y"]


async def test_a_cancelled_call_leaves_the_answers_of_the_others_where_they_belong(store: Store) -> None:
    await echo(store, "first")
    calls = [asyncio.create_task(echo(store, str(number))) for number in range(100)]
    await asyncio.sleep(0)  # they are sent
    for call in calls[::3]:
        call.cancel()
    results = await asyncio.gather(*calls, return_exceptions=True)
    kept = [result for number, result in enumerate(results) if number % 3]
    assert kept == [str(number) for number in range(100) if number % 3]
    assert await echo(store, "last") == "last"


async def test_after_the_server_closed_its_connections_calls_go_on(store: Store) -> None:
    assert await echo(store, "a") == "a"
    await store.client.client_kill_filter(_type="normal", skipme=True)
    assert await echo(store, "b") == "b"  # it may run twice, so it is tried again
    await store.client.client_kill_filter(_type="normal", skipme=True)

    async def added() -> bool:
        try:
            await store.fcall("add", ["counter"], [1])
        except Unreachable:
            return False
        return True

    await until(added, what="a write gets through over a new connection")
    assert await store.client.get("counter") == b"1"


async def test_a_server_that_hangs_fails_all_calls_in_time_and_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CALL_TIMEOUT_S", 0.2)
    with ValkeyProcess() as server:
        store = await open_store(server.url, wait=False)
        try:
            await store.load_functions(LIBRARY)
            assert await echo(store, "a") == "a"
            server.pause()
            try:
                results = await asyncio.gather(*(echo(store, str(n)) for n in range(20)), return_exceptions=True)
            finally:
                server.resume()
            assert all(isinstance(result, Unreachable) and "no answer in time" in str(result) for result in results)

            async def answers() -> bool:
                try:
                    return await echo(store, "b") == "b"
                except Unreachable:
                    return False

            await until(answers, what="the store is used again")
        finally:
            await store.close()


async def test_nothing_that_is_closed_keeps_a_caller_waiting(store: Store) -> None:
    calls = [asyncio.create_task(echo(store, str(number))) for number in range(10)]
    await asyncio.sleep(0)
    other = await open_store(store.url, wait=False)
    waiting = [asyncio.create_task(echo(other, "x" * 100_000)) for _ in range(10)]
    await asyncio.sleep(0)
    await other.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, (Unreachable, asyncio.CancelledError)) for result in results)
    assert await asyncio.gather(*calls) == [str(number) for number in range(10)]


@pytest.mark.parametrize(
    "command",
    [
        ("GET", "key"),
        ("FCALL", "function", 0),
        ("FCALL", "function", 0, 1, 2.5, b"\r\n", "\u00e9"),
        ("FCALL_RO", "function", 2, "key", b"another"),
        ("FCALL", "function", 2, "key", "another", b"", -1),
    ],
)
def test_commands_are_packed_as_hiredis_packs_them(command: tuple[Any, ...]) -> None:
    for _ in range(2):  # the second time, its keys are known
        assert pack(command) == pack_command(command)
