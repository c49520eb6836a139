"""`/` on the status port of a process: the page, and the answers of its probe.

Figures are collected at most once a second, however many viewers there are. Sections are independent: if one of them can't be
read, it shows the error instead.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from kvatlas.errors import InvalidValue, KvatlasError
from kvatlas.status_page.content import Cell, Fact, Section, Tone
from kvatlas.status_page.probe import MAX_BYTES, Form, Probe, Query

FRESH_S = 1.0
SECTION_S = 3.0
PROBE_S = 15.0
"""Long, because an engine may have to tokenize the text first."""


@dataclass(frozen=True, slots=True)
class Source:
    """One section: its name and title, and the function that reads it, which may raise KvatlasError, TimeoutError or one of the
    page's failures."""

    name: str
    title: str
    read: Callable[[], Awaitable[Section]]


class _TooLong(Exception):
    """The form is larger than MAX_BYTES."""


class StatusPage:
    """The page of one process; `routes` are the paths that it serves."""

    def __init__(
        self,
        role: str,
        name: Callable[[], str],
        facts: Callable[[], Sequence[Fact]],
        sources: Sequence[Source],
        probe: Probe | None = None,
        failures: tuple[type[Exception], ...] = (),
    ) -> None:
        """`role`: the kind of process; `name`: which one it is. `facts`: figures that need no waiting. `failures`: other errors
        that sections and the probe raise when a server is down."""
        self._failures: tuple[type[Exception], ...] = (KvatlasError, TimeoutError, *failures)
        self._role = role
        self._name = name
        self._facts = facts
        self._sources = sources
        self._probe = probe
        self._sections: Sequence[Section] = ()
        self._read_at: float | None = None
        self._reading = asyncio.Lock()
        self._probing = asyncio.Lock()
        self.routes = [Route("/", self._show, methods=["GET"])]
        if probe is not None:
            self.routes.append(Route("/", self._answer, methods=["POST"]))

    async def _show(self, _: Request) -> Response:
        return await self._page(await self._form())

    async def _answer(self, request: Request) -> Response:
        assert self._probe is not None
        form = await self._form()
        assert form is not None
        try:
            query = Query.parse(await _read(request))
        except ClientDisconnect:
            return Response()
        except _TooLong:
            return await self._page(replace(form, error=f"the form has more than {MAX_BYTES:,} bytes"), 413)
        except InvalidValue as error:
            return await self._page(replace(form, error=str(error)), 400)
        form = replace(form, query=query)
        try:
            async with self._probing, asyncio.timeout(PROBE_S):
                form = replace(form, answer=await self._probe.answer(query))
        except self._failures as error:
            status = 400 if isinstance(error, InvalidValue) else 503
            return await self._page(replace(form, error=_line(error)), status)
        return await self._page(form)

    async def _page(self, form: Form | None, status: int = 200) -> Response:
        from kvatlas.status_page import page  # jinja2 takes 2 MiB, and most sidecars' pages are never opened

        sections = await self._read_sections()
        text = page.render(self._role, self._name(), self._facts(), sections, form)
        return HTMLResponse(text, status, page.headers())

    async def _form(self) -> Form | None:
        if self._probe is None:
            return None
        form = Form({})
        try:
            async with asyncio.timeout(SECTION_S):
                return replace(form, models=await self._probe.models())
        except self._failures as error:
            return replace(form, error=_line(error))

    async def _read_sections(self) -> Sequence[Section]:
        async with self._reading:
            if self._read_at is None or time.monotonic() - self._read_at > FRESH_S:
                self._sections = await asyncio.gather(*map(self._read_section, self._sources))
                self._read_at = time.monotonic()
            return self._sections

    async def _read_section(self, source: Source) -> Section:
        try:
            async with asyncio.timeout(SECTION_S):
                return await source.read()
        except self._failures as error:
            line = Cell(f"Unknown now: {_line(error)}", Tone.BAD)
            return Section(source.name, source.title, lines=[line])


async def _read(request: Request) -> bytes:
    """Read the body. Raises _TooLong."""
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BYTES:
            raise _TooLong
        parts.append(part)
    return b"".join(parts)


def _line(error: BaseException) -> str:
    return str(error) or "no answer in time"
