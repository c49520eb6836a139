"""Long lists of token ids delay no other request."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.errors import InvalidValue
from kvatlas.index.redis.index import open_redis_index
from kvatlas.store.connection import Store
from kvatlas_router.proxy.json_body import UnreadableBody, read_object
from kvatlas_router.queries import question_body
from kvatlas_router.queries.question_body import copy_in_slices, read_question_body
from tests.router.proxy.engines import MODEL, record
from tests.router.queries.servers import running_index_server, write

pytestmark = pytest.mark.anyio

TOKENS = list(range(100_000, 100_000 + 200_000))


async def turns_of_others(read: "asyncio.Future[Any]") -> int:
    """Number of times that another task runs until this one is done."""
    turns = 0
    while not read.done():
        await asyncio.sleep(0)
        turns += 1
    return turns


async def test_others_have_a_turn_between_slices_of_a_long_list() -> None:
    body = json.dumps({"model": MODEL, "token_ids": TOKENS}).encode()
    read = asyncio.ensure_future(read_question_body(body))
    assert await turns_of_others(read) >= len(body) // question_body.SLICE_BYTES
    assert (await read)["token_ids"] == TOKENS
    copied = asyncio.ensure_future(copy_in_slices(TOKENS))
    assert await turns_of_others(copied) >= len(TOKENS) // question_body.SLICE_TOKENS
    assert await copied == TOKENS


@pytest.mark.parametrize(
    "body",
    [
        {"token_ids": [[1] * 70_000] * 2},
        {"a": {"token_ids": [1] * 140_000}},
        {"prompt": [1] * 140_000},
        {"token_ids": [1], "block_hashes": [1] * 140_000},
        {"token_ids": [1] * 1_100_000},
        {str(number): 1 for number in range(140_000)},
    ],
    ids=["nested", "within another", "another list", "beside it", "too long", "many names"],
)
async def test_what_would_take_long_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue):
        await read_question_body(json.dumps(body, separators=(",", ":")).encode())


NAMES = st.sampled_from(["token_ids", "a", '"token_ids": [', "token_ids\\"])
VALUES = st.recursive(
    st.one_of(st.integers(-5, 2**40), st.sampled_from(["", "]", '"token_ids": [1, 2]', "\\"]), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=12), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=30,
)


@given(
    st.dictionaries(NAMES, VALUES, max_size=4), st.sampled_from(["", ",", "]", ' "token_ids": [3, 4, ', "}"]), st.data()
)
def test_a_body_in_slices_is_read_as_a_whole_one(value: dict[str, Any], more: str, data: st.DataObject) -> None:
    """Anything that is not JSON is refused."""
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    body = (text[:at] + more + text[at:]).encode()

    async def read() -> Any:
        try:
            return await read_question_body(body)
        except UnreadableBody:
            return None

    try:
        whole = read_object(body)[0]
    except UnreadableBody:
        whole = None
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(question_body, "LARGE_BODY", 1)
        patched.setattr(question_body, "SLICE_BYTES", 2)
        assert asyncio.run(read()) == whole


async def test_a_question_of_a_million_token_ids_is_answered(store: Store, valkey_url: str) -> None:
    await open_redis_index(store, writer=True)
    await write(store, record("w", "http://w:8000"))
    async with running_index_server(valkey_url) as (client, _):
        for path, most in (("/query", 1 << 20), ("/kvatlas/overlap", 1 << 17)):
            for length, status in ((most, 200), (most + 1, 400)):
                name = "model" if path == "/query" else "model_id"
                body = json.dumps({name: MODEL, "token_ids": [7] * length}, separators=(",", ":"))
                assert (await client.post(path, content=body)).status_code == status
