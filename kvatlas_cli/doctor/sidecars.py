"""Reads our processes' status pages: finds publishers that are not heard on this NATS, and the certificates in use."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import anyio

from kvatlas.errors import DATA_ERRORS
from kvatlas.redaction import redact_url
from kvatlas.runtime.certificate_files import CertificateState
from kvatlas.store.access import tls_context
from kvatlas_cli.doctor.certificates import judge_certificates
from kvatlas_cli.doctor.finding import Finding, Level

ANSWER_S = 2.0


class PublishedWorker(NamedTuple):
    """A worker on its publisher's page. `nats`: the server to which the publisher is connected. `diagnoses`: problems that
    the publisher sees, each with its fix."""

    worker_id: str
    nats: str
    diagnoses: Sequence[tuple[str, str]]


class StatusPage(NamedTuple):
    """A process's page. `publishes`: the process is a publisher. `error`: why the page could not be read; empty if it
    could."""

    url: str
    workers: Sequence[PublishedWorker] = ()
    certificates: Sequence[CertificateState] = ()
    publishes: bool = True
    error: str = ""


async def read_status_pages(urls: Sequence[str]) -> Sequence[StatusPage]:
    pages = [StatusPage(url) for url in urls]

    async def read(at: int) -> None:
        pages[at] = await _read(urls[at])

    async with anyio.create_task_group() as tasks:
        for at in range(len(urls)):
            tasks.start_soon(read, at)
    return pages


def judge_status_pages(pages: Sequence[StatusPage], heard: Collection[str], nats: str) -> Iterator[Finding]:
    """Judge status pages. `heard`: the workers whose heartbeats arrived on this NATS server, `nats`."""
    check = "workers.publishers"
    for page in pages:
        where = redact_url(page.url)
        if page.error:
            yield Finding(
                check, Level.ERROR, f"status page {where}: {page.error}", "is `kvatlas publish` running there?"
            )
            continue
        yield from judge_certificates(where, page.certificates)
        if not page.publishes:
            continue
        if not page.workers:
            line = f"the publisher at {where} publishes no worker yet: it waits for NATS, or for its engine"
            yield Finding(check, Level.ERROR, line, "see its log; does it reach the NATS of its --nats-url?")
        for one in page.workers:
            if one.worker_id in heard:
                continue
            line = f"{one.worker_id} (publisher at {where}) is connected to NATS at {one.nats}, but not heard on {nats}"
            advice = "give publishers, indexers and this command the same --nats-url"
            yield Finding(check, Level.ERROR, line, advice)
            for seen, cure in one.diagnoses:
                yield Finding(check, Level.ERROR, f"{one.worker_id}: {seen}", cure)


async def _read(url: str) -> StatusPage:
    import httpx  # part of the extras publisher and router

    try:
        tls = tls_context("status pages") if url.startswith("https:") else False
        async with httpx.AsyncClient(verify=tls, timeout=ANSWER_S, trust_env=False) as client:
            with anyio.fail_after(ANSWER_S):
                answer = await client.get(f"{url.rstrip('/')}/status")
        if answer.status_code != 200:
            return StatusPage(url, error=f"answers /status with {answer.status_code}")
        said = answer.json()
        certificates = [CertificateState(**one) for one in said.get("certificates", ())]
        if "partitions" in said or "in_flight" in said:  # an indexer's, or a router's
            return StatusPage(url, certificates=certificates, publishes=False)
        return StatusPage(url, [_worker_of(one) for one in said["workers"]], certificates)
    except (httpx.HTTPError, TimeoutError) as error:
        return StatusPage(url, error=str(error) or "no answer in time")
    except DATA_ERRORS:
        return StatusPage(url, error="it is not a status page of kvatlas")


def _worker_of(status: dict[str, Any]) -> PublishedWorker:
    diagnoses = [(str(one["seen"]), str(one["cure"])) for one in status.get("diagnoses", ())]
    return PublishedWorker(str(status["worker_id"]), str(status.get("nats") or "(not connected)"), diagnoses)
