"""Function libraries: what they are made of, and what happens if the server does not have them."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from kvatlas.errors import Unreachable
from kvatlas.store.connection import Store, connected_store
from kvatlas.store.function_library import FunctionLibrary

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(fresh_store: str) -> AsyncIterator[Store]:
    async with connected_store(fresh_store, wait=False) as opened:
        yield opened
        await opened.client.function_flush()


@pytest.fixture
def library(tmp_path: Path) -> FunctionLibrary:
    """Functions that return their first argument, fail, and return a shared constant."""
    call = "{{function_name = '{}', callback = function(keys, args) {} end, flags = {{'no-writes'}}}}"
    register = f"redis.register_function{call}"
    (tmp_path / "_shared.lua").write_text("local ANSWER = 'shared'")
    (tmp_path / "echo.lua").write_text(register.format("test_echo", "return args[1]"))
    (tmp_path / "fail.lua").write_text(register.format("test_fail", "return redis.error_reply('ERR no')"))
    (tmp_path / "answer.lua").write_text(register.format("test_answer", "return ANSWER"))
    return FunctionLibrary("kvatlas_test", tmp_path, ("_shared",))


def test_shared_files_come_first_and_then_one_file_a_command(library: FunctionLibrary) -> None:
    lines = library.code.splitlines()
    assert lines[:2] == ["#!lua name=kvatlas_test", "local ANSWER = 'shared'"]
    assert [line.split("'")[1] for line in lines[2:]] == ["test_answer", "test_echo", "test_fail"]


async def test_a_missing_library_is_loaded_by_any_call(store: Store, library: FunctionLibrary) -> None:
    for _ in range(2):
        assert await library.call(store, "test_echo", [], ["a"]) == b"a"
        await store.client.function_flush()
        assert await library.call_ro(store, "test_answer", [], []) == b"shared"
        await store.client.function_flush()
        assert await library.call_ro_many(store, "test_echo", [([], ["a"]), ([], ["b"])]) == [b"a", b"b"]
        await store.client.function_flush()


async def test_a_caller_that_must_not_load_gets_one_clear_line(store: Store, library: FunctionLibrary) -> None:
    with pytest.raises(Unreachable, match="its functions are gone"):
        await library.call(store, "test_echo", [], ["a"], load=False)
    await library.load(store)
    assert await library.call(store, "test_echo", [], ["a"], load=False) == b"a"


async def test_a_functions_own_error_is_raised(store: Store, library: FunctionLibrary) -> None:
    with pytest.raises(ResponseError, match="no"):
        await library.call(store, "test_fail", [], [])
