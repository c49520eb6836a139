"""Streams that can't be continued after their engine died: each ends with an error, and its reason is counted."""

from typing import Any

import pytest

from kvatlas.store.connection import Store
from kvatlas_router.continuation import seam
from kvatlas_router.tokens.text_request import Api
from tests.router.continuation.mortal_engine import mortal_fleet
from tests.router.continuation.test_continued_streams import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    TOOL,
    ask,
    not_continued,
    prompt_of,
)
from tests.router.proxy.engines import running_proxy
from tests.router.proxy.faulty_engine import faulty_engine
from tests.router.proxy.faulty_engine import status as answer_with
from tests.router.proxy.test_proxy import status

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"temperature": 0.7}, "sampled"),
        ({"n": 9}, "choices"),
        ({"ignored": 1}, "no_worker"),
        (
            {"tools": [TOOL], "chat_template_kwargs": {"thinking": True}},
            "template",
        ),  # the prompt itself begins the reasoning
    ],
)
async def test_what_can_not_go_on_ends_with_an_error(
    store: Store, valkey_url: str, fields: dict[str, Any], why: str
) -> None:
    body = {"messages": MESSAGES, "max_tokens": 8, **fields}
    workers = 1 if why == "no_worker" else 2
    async with (
        mortal_fleet(store, workers) as (_, fate),
        running_proxy(valkey_url, continue_answers="deterministic") as client,
    ):
        fate.after = [6]
        found = await ask(client, CHAT, body)
        assert b'data: {"error": ' in found and not found.endswith(b"data: [DONE]\n\n") and len(fate.asked) == 1
        assert await not_continued(client) == {why: 1}
        assert (await status(client))["proxy"]["broken"] == 1


async def test_an_answer_that_is_too_long_to_keep_ends_with_its_engine(
    store: Store, valkey_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seam, "MOST_LETTERS", 2)
    async with mortal_fleet(store) as (_, fate), running_proxy(valkey_url, continue_answers="all") as client:
        fate.after = [6]
        assert b'data: {"error": ' in await ask(client, CHAT, {"messages": MESSAGES, "max_tokens": 8})
        assert await not_continued(client) == {"long": 1} and len(fate.asked) == 1


async def test_an_answer_about_a_file_ends_with_the_engine_that_has_it(store: Store, valkey_url: str) -> None:
    async with mortal_fleet(store, 1) as (_, fate), running_proxy(valkey_url, continue_answers="all") as client:
        fate.after = [6]
        messages = [{**MESSAGES[1], "attachments": [{"file_id": "file-1"}]}]
        assert b'data: {"error": ' in await ask(client, CHAT, {"messages": messages, "max_tokens": 8})
        assert await not_continued(client) == {"object": 1}


async def test_an_answer_whose_rest_is_refused_ends_with_an_error(store: Store, valkey_url: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 8, "cache_salt": None}
    async with mortal_fleet(store, 2) as (fleet, fate), faulty_engine(answer_with(400)) as refusing:
        await fleet.report("w1", refusing.url)
        await fleet.holds("w0", prompt_of(Api.CHAT, body))
        fate.after = [6]
        async with running_proxy(valkey_url, continue_answers="all") as client:
            assert b'data: {"error": ' in await ask(client, CHAT, body)
            assert await not_continued(client) == {"refused": 1} and refusing.paths.keys() & {CHAT, COMPLETIONS}
