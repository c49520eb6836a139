"""Streams whose engine dies: what their clients get equals an undisturbed run."""

import itertools
import re
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from kvatlas.store.connection import Store
from kvatlas_router.outliers.retry_budget import RetryBudget
from tests.router.continuation.mortal_engine import Death, Fate, mortal_fleet, read_stream
from tests.router.progress.quick_bounds import shorten_bounds
from tests.router.proxy.engines import MODEL, running_proxy
from tests.router.proxy.test_proxy import status

pytestmark = pytest.mark.anyio

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Who holds the prefix?"}]
_USAGE = {"stream_options": {"include_usage": True}}
REQUESTS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": MESSAGES, "max_tokens": 9, **_USAGE}),
    "chat without usage": (CHAT, {"messages": MESSAGES, "max_completion_tokens": 7}),
    "text": (COMPLETIONS, {"prompt": "Who holds the prefix?", "max_tokens": 8, **_USAGE}),
    "text, with the default limit": (COMPLETIONS, {"prompt": "Who?"}),
    "token ids": (COMPLETIONS, {"prompt": list(b"Who holds it?"), "max_tokens": 7, **_USAGE}),
    "token ids, shown": (COMPLETIONS, {"prompt": list(b"Who?"), "max_tokens": 6, "return_token_ids": True, **_USAGE}),
    "usage in each event": (
        COMPLETIONS,
        {
            "prompt": "Who?",
            "max_tokens": 6,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
}
_SALTS = itertools.count()


@pytest.fixture
def no_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that these tests don't use up: every request of theirs loses its engine."""
    monkeypatch.setattr(RetryBudget, "take", lambda _: True)


async def ask(client: httpx.AsyncClient, path: str, body: Mapping[str, Any], **fields: Any) -> bytes:
    """The stream of a request that finds nothing in a cache, without what is new in each answer."""
    salt = f"salt {next(_SALTS)}"
    whole = {"model": MODEL, "temperature": 0, "stream": True, "cache_salt": salt, **body, **fields}
    raw = await read_stream(client, path, whole)
    return re.sub(rb'"(id|created)":("[\w-]+"|\d+)', _once(raw), raw)


def _once(raw: bytes) -> Any:
    """All events of a stream have the same id and time."""
    ids = set(re.findall(rb'"id":"([\w-]+)"', raw))
    assert len(ids) <= 1 and len(set(re.findall(rb'"created":(\d+)', raw))) <= 1
    return rb'"\1":0'


async def not_continued(client: httpx.AsyncClient) -> dict[str, int]:
    """How often streams could not go on, by reason."""
    counted = (await status(client))["proxy"]["continued"]
    return {why: number for why, number in counted.items() if number and why != "resumed"}


def events(raw: bytes) -> int:
    return raw.count(b"\n\n")


async def test_a_stream_goes_on_after_each_of_its_events(store: Store, valkey_url: str, no_budget: None) -> None:
    async with mortal_fleet(store) as (_, fate), running_proxy(valkey_url, continue_answers="all") as client:
        died = 0
        for name, (path, body) in REQUESTS.items():
            undisturbed = await ask(client, path, body)
            assert undisturbed.endswith(b"data: [DONE]\n\n")
            first = 2 if path == CHAT else 1  # the router tries again before the first content anyway
            for after in range(first, events(undisturbed)):
                fate.death = Death.KILLED if after % 2 else Death.RESET
                fate.after, fate.asked = [after], []
                found = await ask(client, path, body)
                assert found == undisturbed, (name, after, await not_continued(client), fate.asked)
                died += 1
                assert len({worker_id for worker_id, _ in fate.asked}) == len(fate.asked)
        proxy = (await status(client))["proxy"]
        assert (proxy["broken"], proxy["gave_up"]) == (0, 0) and died > 40
