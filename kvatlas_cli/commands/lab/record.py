"""`kvatlas record`: records a fleet's request stream as a trace."""

import asyncio
from pathlib import Path
from typing import Annotated

import httpx
import typer

from kvatlas.errors import InvalidValue, Unreachable
from kvatlas.redaction import redact_url
from kvatlas.settings import RecordSettings
from kvatlas_cli.flags import with_settings
from kvatlas_cli.output import count_text, print_notice
from kvatlas_cli.runner import run_service
from kvatlas_simulator.lab.recorder import TraceRecorder

PATH = "/kvatlas/requests"
CONNECT_S = 5.0
AGAIN_S = 1.0
"""Interval between attempts to reach a router that disconnected."""


@with_settings(RecordSettings)
def record(
    settings: RecordSettings,
    out: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write the trace; gzipped if it ends in .gz.")],
) -> None:
    """Record the requests that routers answer, as hashes, sizes and times, for `replay` and `calibrate`."""
    run_service("record", settings, _record(settings, out))


async def _record(settings: RecordSettings, out: Path) -> None:
    headers = {"Authorization": f"Bearer {settings.token}"} if settings.token else {}
    timeout = httpx.Timeout(CONNECT_S, read=None)
    recorder = TraceRecorder(out, settings.mib << 20, settings.model_id)
    try:
        async with httpx.AsyncClient(headers=headers, timeout=timeout, trust_env=False) as client:
            print_notice(f"recording {count_text(len(settings.routers), 'router')}; stop with Ctrl-C")
            await _follow_all(client, settings, recorder)
    finally:
        recorder.close()
        print_notice(_summary(out, recorder))


async def _follow_all(client: httpx.AsyncClient, settings: RecordSettings, recorder: TraceRecorder) -> None:
    try:
        async with asyncio.timeout(settings.minutes * 60), asyncio.TaskGroup() as tasks:
            followers = [tasks.create_task(_follow(client, url, recorder)) for url in settings.routers]
            await asyncio.wait(followers, return_when=asyncio.FIRST_COMPLETED)  # the file is full, or a follower failed
            for follower in followers:
                follower.cancel()
    except TimeoutError:
        return
    except ExceptionGroup as group:
        raise group.exceptions[0] from None


async def _follow(client: httpx.AsyncClient, url: str, recorder: TraceRecorder) -> None:
    """Follow one router until the file is full. Raises Unreachable if the router has never been reachable, or does not
    publish requests."""
    name, seen = redact_url(url), False
    while not recorder.full:
        try:
            async with client.stream("GET", url.rstrip("/") + PATH) as answer:
                if answer.status_code != 200:
                    raise Unreachable(f"{name}: {_refusal(answer.status_code)}")
                seen = True
                async for line in answer.aiter_lines():
                    recorder.add(line.encode())
                    if recorder.full:
                        return
            line = "it has stopped"
        except InvalidValue as error:
            raise InvalidValue(f"{name}: {error}; expected a router of this version") from error
        except httpx.HTTPError as error:
            line = str(error) or type(error).__name__
            if not seen:
                raise Unreachable(f"{name}: {line}") from error
        print_notice(f"{name}: {line}; trying again every {AGAIN_S:g} s")
        await asyncio.sleep(AGAIN_S)


def _refusal(status: int) -> str:
    if status == 401:
        return "it requires a token; set --token-file to a file with one of its tokens"
    if status == 404:
        return "it does not publish requests; start it with --record"
    return f"status {status}; expected a kvatlas router"


def _summary(out: Path, recorder: TraceRecorder) -> str:
    parts = [f"{out}: {count_text(recorder.requests, 'request')}"]
    if recorder.unread:
        parts.append(f"{recorder.unread:,} left out, because their router did not know their tokens")
    if recorder.dropped:
        parts.append(f"{recorder.dropped:,} missed, because this command was too slow")
    if recorder.full:
        parts.append("full (--mib)")
    if len(recorder.models) > 1:
        parts.append(f"{len(recorder.models)} models, which a replay treats as one: --model-id records only one")
    return "; ".join(parts)
