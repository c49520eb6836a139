"""`kvatlas publish`: the publisher of one engine rank, as a sidecar."""

from kvatlas.cli.flags import with_settings
from kvatlas.cli.running import run_service
from kvatlas.settings import PublishSettings


@with_settings(PublishSettings)
def publish(settings: PublishSettings) -> None:
    """Follow one engine's KV events and tell the fleet's index what it holds."""
    from publishers.sidecar import run_sidecar  # needs the extra

    run_service("publisher", settings, run_sidecar(settings))
