"""`kvatlas publish`: the publisher of one engine, or of all its ranks, as a sidecar."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvatlas.settings import PublishSettings
from kvatlas_cli.flags import with_settings
from kvatlas_cli.output import print_notice
from kvatlas_cli.runner import run_service

if TYPE_CHECKING:
    from publishers.publisher import Publisher


@with_settings(PublishSettings)
def publish(settings: PublishSettings) -> None:
    """Follow one engine's KV events and publish what it holds to the index."""
    from publishers.sidecar import run_sidecar  # needs the extra

    run_service("publisher", settings, run_sidecar(settings.ranks, ready=_print_ready))


def _print_ready(publishers: "Sequence[Publisher]") -> None:
    for publisher in publishers:
        print_notice(f"worker {publisher.worker_id} is published")
