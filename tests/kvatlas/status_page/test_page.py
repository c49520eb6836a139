"""The status page as HTML, whatever a process shows on it."""

import re
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from urllib.parse import urlencode

import httpx
import pytest
from starlette.applications import Starlette

from kvatlas.errors import InvalidValue, Unreachable
from kvatlas.status_page.content import Cell, Column, Fact, Section, Table
from kvatlas.status_page.probe import MAX_BYTES, PromptKind, Query
from kvatlas.status_page.server import Source, StatusPage

pytestmark = pytest.mark.anyio

HOSTILE = "<script>alert('x')</script>\"&"
ESCAPED = "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&#34;&amp;"


class EchoProbe:
    """Answers with the query itself; has no answer for the model `away`, and refuses the model `wrong`."""

    def __init__(self) -> None:
        self.asked: list[Query] = []

    async def models(self) -> Mapping[str, str]:
        return {"m": "m", HOSTILE: HOSTILE}

    async def answer(self, query: Query) -> Section:
        self.asked.append(query)
        if query.model == "away":
            raise Unreachable("Redis at x: refused")
        if query.model == "wrong":
            raise InvalidValue("token 0 is 'a'; expected an integer")
        return Section("answer", "Echo", lines=[Cell(query.prompt)])


@asynccontextmanager
async def served(page: StatusPage) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(Starlette(routes=page.routes))
    async with httpx.AsyncClient(transport=transport, base_url="http://page") as client:
        yield client


def page_of(probe: EchoProbe | None = None, *sources: Source) -> StatusPage:
    return StatusPage("router", lambda: HOSTILE, lambda: [Fact("one", Cell(HOSTILE))], sources, probe)


async def ask(client: httpx.AsyncClient, **fields: str) -> httpx.Response:
    given = {"kind": "text", "prompt": "fox", **fields}
    headers = {"content-type": "application/x-www-form-urlencoded"}
    return await client.post("/", content=urlencode(given), headers=headers)


async def test_what_others_named_is_text_in_the_page_and_never_markup() -> None:
    async def read() -> Section:
        cell = Cell(HOSTILE, hint=HOSTILE)
        table = Table([Column(HOSTILE, hint=HOSTILE)], [[cell]], note=HOSTILE, title=HOSTILE)
        return Section("workers", HOSTILE, [table], [cell])

    async with served(page_of(EchoProbe(), Source("workers", "Workers", read))) as client:
        shown = await client.get("/")
        assert shown.status_code == 200 and HOSTILE not in shown.text
        assert shown.text.count(ESCAPED) >= 9
        answered = await ask(client, prompt=HOSTILE, model=HOSTILE, tenant=HOSTILE)
        assert HOSTILE not in answered.text and answered.text.count(ESCAPED) > shown.text.count(ESCAPED)


async def test_the_page_has_all_it_needs_and_its_policy_allows_nothing_else() -> None:
    async with served(page_of(EchoProbe())) as client:
        answer = await client.get("/")
    assert not re.search(r"""(?:src|href|action|url\()\s*=?\s*["'(]?(?:https?:)?//""", answer.text)
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["frame-ancestors"] == "'none'"
    for tag, name in (("style", "style-src"), ("script", "script-src")):
        (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        assert policy[name] == f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
    assert " style=" not in answer.text and not re.search(r"\son\w+=", answer.text)
    assert answer.headers["cache-control"] == "no-store"


async def test_a_section_that_is_not_known_says_so_in_its_place() -> None:
    async def away() -> Section:
        raise Unreachable("Redis at 10.0.0.1:6379: refused")

    async def well() -> Section:
        return Section("workers", "Workers", lines=[Cell("all is well")])

    async with served(page_of(None, Source("p", "Partitions", away), Source("workers", "Workers", well))) as client:
        answer = await client.get("/")
    assert answer.status_code == 200
    assert "Unknown now: Redis at 10.0.0.1:6379: refused" in answer.text and "all is well" in answer.text


async def test_figures_are_read_once_however_many_look() -> None:
    reads = 0

    async def read() -> Section:
        nonlocal reads
        reads += 1
        return Section("workers", "Workers")

    page = page_of(None, Source("workers", "Workers", read))
    async with served(page) as client:
        for _ in range(5):
            await client.get("/")
        assert reads == 1
        assert page._read_at is not None
        page._read_at -= 10
        await client.get("/")
        assert reads == 2


async def test_a_probe_is_answered_with_the_prompt_as_it_was_pasted() -> None:
    probe = EchoProbe()
    async with served(page_of(probe)) as client:
        answer = await ask(client, prompt="\r\ntwo\r\nlines, ü ", model=" m ", tenant="t")
    assert answer.status_code == 200 and '<section id="answer">' in answer.text
    assert probe.asked == [Query(PromptKind.TEXT, "\ntwo\nlines, ü ", "m", "t")]
    assert '<option value="m" selected>' in answer.text and "\ntwo\nlines, ü </textarea>" in answer.text


async def test_a_probe_that_gets_no_answer_says_why() -> None:
    probe = EchoProbe()
    async with served(page_of(probe)) as client:
        for fields, status, line in (
            ({"prompt": " "}, 400, "the prompt is empty"),
            ({"kind": "image"}, 400, "kind is &#39;image&#39;; expected one of tokens, text, chat"),
            ({"tenant": "t" * 600}, 400, "tenant has 600 bytes"),
            ({"model": "wrong"}, 400, "token 0 is"),
            ({"model": "away"}, 503, "Redis at x: refused"),
        ):
            answer = await ask(client, **fields)
            assert (answer.status_code, line in answer.text) == (status, True), answer.text
            assert 'role="alert"' in answer.text
        bodies = [b"\xff", b"prompt=%ff&kind=text", b"&".join([b"a=1"] * 40), b"", b'{"prompt": "fox"}']
        for body in bodies:
            assert (await client.post("/", content=body)).status_code == 400
        asked = len(probe.asked)
        long = await client.post("/", content=b"prompt=" + b"a" * MAX_BYTES)
        assert long.status_code == 413 and f"more than {MAX_BYTES:,} bytes" in long.text
        assert len(probe.asked) == asked


async def test_a_page_without_a_probe_takes_no_form() -> None:
    async with served(page_of()) as client:
        assert "<form" not in (await client.get("/")).text
        assert (await ask(client)).status_code == 405
