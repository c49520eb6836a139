"""`kvatlas publish`: the publisher of one engine, or of all its ranks, as a sidecar."""

import asyncio
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvatlas.settings import PublishSettings
from kvatlas_cli.flags import with_settings
from kvatlas_cli.output import print_notice
from kvatlas_cli.runner import print_ready, run_service

if TYPE_CHECKING:
    from kvatlas_publishers.publisher import Publisher


@with_settings(PublishSettings)
def publish(settings: PublishSettings) -> None:
    """Follow one engine's KV events and publish its blocks to the index. SIGUSR1 drains it: no new requests for its workers."""
    from kvatlas_publishers.sidecar import run_sidecar  # needs the extra

    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # nothing to drain before the workers are published
    run_service(
        "publisher", settings, run_sidecar(settings.ranks, ready=_ready), metrics_page=settings.status_port is not None
    )


def _ready(publishers: "Sequence[Publisher]") -> None:
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _drain, publishers)
    for publisher in publishers:
        print_ready(f"worker {publisher.worker_id} is published")


def _drain(publishers: "Sequence[Publisher]") -> None:
    for publisher in publishers:
        print_notice(f"worker {publisher.worker_id} drains: routers send it nothing new")
        publisher.drain()
