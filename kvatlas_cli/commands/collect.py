"""`kvatlas collect`: publishers for the engines that Kubernetes lists."""

import tempfile
from contextlib import ExitStack
from pathlib import Path

from kvatlas.settings import CollectSettings
from kvatlas_cli.flags import with_settings
from kvatlas_cli.output import print_notice
from kvatlas_cli.runner import run_service


@with_settings(CollectSettings)
def collect(settings: CollectSettings) -> None:
    """Publish for every labeled engine of a Kubernetes namespace, without changing its pod.

    Engines must publish KV events on an address that this pod reaches; their token ids cross the network, unencrypted."""
    run_service("publisher", settings, _collect(settings))


async def _collect(settings: CollectSettings) -> None:
    from kvatlas_cli.collector import Collector
    from kvatlas_router.gateway.kubernetes_api import open_kubernetes_api  # needs the extra

    with ExitStack() as stack:
        folder = settings.state_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvatlas-")))
        async with open_kubernetes_api() as api:
            print_notice(f"following pods with {settings.selector}")
            await Collector(api, settings, folder).run()
