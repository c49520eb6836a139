"""The files of the function libraries have one command each, and are far from Lua's limits."""

import re
from collections.abc import AsyncIterator

import pytest
from redis.exceptions import ResponseError

from kvatlas.fleet_store.fleet_store import FLEET_LIBRARY
from kvatlas.index.redis.index_functions import INDEX_LIBRARY
from kvatlas.reservations.redis_calls import POOL_LIBRARY
from kvatlas.store.connection import Store, connected_store
from kvatlas.store.function_library import FunctionLibrary

MOST_LOCALS, LOCALS = 120, 200
"""Our limit of locals in scope at once; Lua 5.1 allows LOCALS."""
MOST_UPVALUES, UPVALUES = 40, 60
"""Our limit of a function's upvalues; Lua 5.1 allows UPVALUES."""

PREFIXES = {INDEX_LIBRARY: "kvatlas_", POOL_LIBRARY: "kvatlas_pool_", FLEET_LIBRARY: "kvatlas_fleet_"}

libraries = pytest.mark.parametrize("library", PREFIXES, ids=lambda library: library.family)


@pytest.fixture
async def store(fresh_valkey: str) -> AsyncIterator[Store]:
    async with connected_store(fresh_valkey, wait=False) as opened:
        yield opened


def with_more(code: str, locals: int = 0, upvalues: int = 0) -> str:
    """The code with this many more locals in each block and upvalues in each function, which the server's compiler counts."""
    more = [f"local more{i} = {i}" for i in range(upvalues)]
    code = code.replace("\n", "\n" + "".join(f"{line}\n" for line in more), 1)
    code = re.sub(r"^do$", "do\n" + "\n".join(f"local one{i}" for i in range(locals)), code, flags=re.MULTILINE)
    if not upvalues:
        return code
    named = ", ".join(f"more{i}" for i in range(upvalues))
    return re.sub(r"(\bfunction\b[^()\n]*\([^()\n]*\))$", rf"\1 local all = {{ {named} }}", code, flags=re.MULTILINE)


@libraries
def test_a_file_has_one_command_and_its_name(library: FunctionLibrary) -> None:
    for stem in library.commands:
        registered = re.findall(r"^register\w*\('(\w+)'", library.source(stem), re.MULTILINE)
        assert registered == [PREFIXES[library] + stem]
    for stem in library.shared:
        assert stem.startswith("_")
        assert not re.search(r"^register", library.source(stem), re.MULTILINE)


@libraries
@pytest.mark.anyio
async def test_the_limits_of_lua_are_far(library: FunctionLibrary, store: Store) -> None:
    await store.load_functions(with_more(library.code, locals=LOCALS - MOST_LOCALS))
    await store.load_functions(with_more(library.code, upvalues=UPVALUES - MOST_UPVALUES))


@pytest.mark.anyio
async def test_the_compiler_finds_what_is_too_much(store: Store) -> None:
    with pytest.raises(ResponseError, match="more than 200 local variables"):
        await store.load_functions(with_more(POOL_LIBRARY.code, locals=LOCALS))
    with pytest.raises(ResponseError, match="more than 60 upvalues"):
        await store.load_functions(with_more(POOL_LIBRARY.code, upvalues=UPVALUES))
