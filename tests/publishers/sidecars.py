"""Sidecars of a fake engine, and checks of what they publish."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from nats.aio.client import Client

from kvatlas.fleet.records import EngineKind
from kvatlas.settings import PublishSettings
from kvatlas_publishers.engines import decode_batch
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings
from kvatlas_publishers.publisher import Publisher
from kvatlas_publishers.sidecar import run_sidecar
from tests.eventually import until
from tests.publishers.fake_engine import FakeEngine
from tests.publishers.published_stream import read_stream


def settings(fake: FakeEngine, nats_url: str, **fields: Any) -> PublishSettings:
    return PublishSettings(
        **{
            "engine": EngineKind.VLLM,
            "endpoint": fake.endpoint,
            "replay_endpoint": fake.replay_endpoint,
            "worker_id": "w",
            "model_id": "model",
            "nats_url": nats_url,
            **fields,
        }
    )


@asynccontextmanager
async def sidecar(fake: FakeEngine, nats_url: str, **fields: Any) -> AsyncIterator[Publisher]:
    """A sidecar whose feed is subscribed to the engine."""
    async with anyio.create_task_group() as tasks:
        started: list[Publisher] = []
        tasks.start_soon(run_sidecar, settings(fake, nats_url, **fields), started.extend)
        await until(lambda: started, what="the sidecar is ready")
        await fake.subscribed()
        yield started[0]
        tasks.cancel_scope.cancel()


def ledger_of(kind: EngineKind, payloads: list[bytes], **fields: Any) -> Ledger:
    """The ledger of a publisher that saw all of these payloads."""
    ledger = Ledger(LedgerSettings("model", "model", **fields))
    for payload in payloads:
        ledger.fold(decode_batch(kind, payload))
    return ledger


async def assert_published(client: Client, publisher: Publisher, ledger: Ledger) -> None:
    """Wait until the stream has what the ledger announces."""
    with anyio.fail_after(20):
        await until(lambda: publisher.ledger.digest == ledger.digest, what="all batches folded")
        await publisher.flush()
    published = await read_stream(client)
    assert await published.index.digest(publisher.worker_id) == ledger.digest_words
    assert published.outcomes["failed_checks"] == 0
