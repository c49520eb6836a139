"""Function libraries: what they consist of, and what happens if the server does not have them."""

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from kvatlas.errors import Unreachable
from kvatlas.store.connection import Store, connected_store
from kvatlas.store.function_library import USED_FOR_S, FunctionLibrary, mark_key, read_unmarked

pytestmark = pytest.mark.anyio


@pytest.fixture
async def store(fresh_store: str) -> AsyncIterator[Store]:
    async with connected_store(fresh_store, wait=False) as opened:
        yield opened
        await opened.client.function_flush()


@pytest.fixture
def library(tmp_path: Path) -> FunctionLibrary:
    """Functions that return their first argument, fail, and return a shared constant."""
    call = "{{function_name = '{}' .. TAG, callback = function(keys, args) {} end, flags = {{'no-writes'}}}}"
    register = f"redis.register_function{call}"
    (tmp_path / "_shared.lua").write_text("local ANSWER = 'shared'\n")
    (tmp_path / "echo.lua").write_text(register.format("test_echo", "return args[1]"))
    (tmp_path / "fail.lua").write_text(register.format("test_fail", "return redis.error_reply('ERR no')"))
    (tmp_path / "answer.lua").write_text(register.format("test_answer", "return ANSWER"))
    return FunctionLibrary("kvatlas_test", tmp_path, ("_shared",))


def test_shared_files_come_first_and_then_one_file_a_command(library: FunctionLibrary) -> None:
    first, tag, *rest = filter(None, library.code.splitlines())
    rest = rest[rest.index("local _shared") :]  # after the file that bounds arguments
    assert first == f"#!lua name={library.name}"
    assert tag == f"local TAG = '{library.name.removeprefix('kvatlas_test')}'"
    assert rest[:4] == ["local _shared", "do", "local ANSWER = 'shared'", "_shared = { ANSWER = ANSWER }"]
    assert [line.split("'")[1] for line in rest if "register_function{" in line] == [
        "test_answer",
        "test_echo",
        "test_fail",
    ]


def test_a_file_gets_only_the_names_that_it_mentions(tmp_path: Path) -> None:
    (tmp_path / "_a.lua").write_text("local ONE, TWO = 1, 2 -- not THREE\nlocal function three()\nend\n")
    (tmp_path / "_b.lua").write_text("local FOUR = ONE -- not TWO\n")
    (tmp_path / "c.lua").write_text("three(FOUR)\n")
    code = FunctionLibrary("kvatlas_test", tmp_path, ("_a", "_b")).code
    assert re.findall(r"^local (\w+) = _(\w)\.\1$", code, re.MULTILINE) == [("ONE", "a"), ("FOUR", "b"), ("three", "a")]
    assert re.findall(r"^_\w = .*", code, re.MULTILINE) == ["_a = { ONE = ONE, three = three }", "_b = { FOUR = FOUR }"]


def test_two_shared_files_with_the_same_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "_a.lua").write_text("local ONE = 1\n")
    (tmp_path / "_b.lua").write_text("local ONE = 2\n")
    (tmp_path / "c.lua").write_text("return ONE\n")
    with pytest.raises(ValueError, match=r"_b\.lua redefines names of earlier files: ONE"):
        _ = FunctionLibrary("kvatlas_test", tmp_path, ("_a", "_b")).code


async def test_a_missing_library_is_loaded_by_any_call(store: Store, library: FunctionLibrary) -> None:
    for _ in range(2):
        assert await library.call(store, "test_echo", [], ["a"]) == b"a"
        await store.client.function_flush()
        assert await library.call_ro(store, "test_answer", [], []) == b"shared"
        await store.client.function_flush()
        assert await library.call_ro_many(store, "test_echo", [([], ["a"]), ([], ["b"])]) == [b"a", b"b"]
        await store.client.function_flush()


async def test_a_user_who_may_not_load_gets_one_clear_line(
    store: Store, fresh_store: str, library: FunctionLibrary
) -> None:
    await store.client.acl_setuser(
        "caller", enabled=True, nopass=True, keys=["*"], commands=["+fcall", "+fcall_ro", "+ping"]
    )
    try:
        async with connected_store(fresh_store.replace("redis://", "redis://caller:x@"), wait=False) as caller:
            with pytest.raises(Unreachable, match=f"no function library {library.name}, and this user may not load it"):
                await library.call(caller, "test_echo", [], ["a"])
            await library.load(store)
            assert await library.call(caller, "test_echo", [], ["a"]) == b"a"
    finally:
        await store.client.acl_deluser("caller")


async def test_versions_live_side_by_side(store: Store, library: FunctionLibrary, tmp_path: Path) -> None:
    """Whichever starts last, names say which code is meant."""
    newer = _newer(library, tmp_path)
    assert newer.name != library.name
    for _ in range(2):
        for one, answer in ((library, b"shared"), (newer, b"new")):
            await one.load(store)
            assert await library.call(store, "test_answer", [], []) == b"shared"
            assert await one.call(store, "test_answer", [], []) == answer
    assert await store.list_libraries() == sorted([library.name, newer.name])


async def test_a_library_is_unmarked_once_no_process_calls_it(
    store: Store, library: FunctionLibrary, tmp_path: Path
) -> None:
    newer = _newer(library, tmp_path)
    for one in (library, newer):
        await one.call(store, "test_answer", [], [])
    assert await read_unmarked(store, ["kvatlas_test"]) == []
    assert 0 < await store.client.ttl(mark_key(library.name)) <= USED_FOR_S
    await store.client.delete(mark_key(library.name))  # as after USED_FOR_S
    await store.client.function_load("#!lua name=kvatlas_test\nredis.register_function('f', function() end)")
    assert await read_unmarked(store, ["kvatlas_test"]) == [library.name]  # but none without a tag
    await store.delete_library(library.name)
    await store.delete_library(library.name)
    assert library.name not in await store.list_libraries()


def _newer(library: FunctionLibrary, folder: Path) -> FunctionLibrary:
    """The library after a change to its code."""
    newer = folder / "newer"
    newer.mkdir()
    for file in folder.glob("*.lua"):
        (newer / file.name).write_text(file.read_text().replace("'shared'", "'new'"))
    return FunctionLibrary(library.family, newer, ("_shared",))


async def test_a_functions_own_error_is_raised(store: Store, library: FunctionLibrary) -> None:
    with pytest.raises(ResponseError, match="no"):
        await library.call(store, "test_fail", [], [])
