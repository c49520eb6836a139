"""`kvatlas publish`: the publisher of one engine, or of all its ranks, as a sidecar."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvatlas.settings import PublishSettings
from kvatlas_cli.flags import with_settings
from kvatlas_cli.runner import run_service, tell

if TYPE_CHECKING:
    from publishers.publisher import Publisher


@with_settings(PublishSettings)
def publish(settings: PublishSettings) -> None:
    """Follow one engine's KV events and tell the fleet's index what it holds."""
    from publishers.sidecar import run_sidecar  # needs the extra

    run_service("publisher", settings, run_sidecar(settings.ranks, ready=_ready))


def _ready(publishers: "Sequence[Publisher]") -> None:
    for publisher in publishers:
        tell(f"worker {publisher.worker_id} is published")
