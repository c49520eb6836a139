"""`kvatlas epp`: an endpoint picker, for gateways on Kubernetes."""

from functools import partial
from typing import TYPE_CHECKING

from kvatlas.settings import GatewaySettings
from kvatlas_cli.flags import with_settings
from kvatlas_cli.process_group import replica_flags, run_process_group
from kvatlas_cli.runner import print_ready, run_service

if TYPE_CHECKING:
    from kvatlas_router.gateway.service import RunningPicker


@with_settings(GatewaySettings)
def epp(settings: GatewaySettings) -> None:
    """Choose the engine for each request of a gateway: an endpoint picker over Envoy's external processing."""
    from kvatlas_router.gateway.service import run_endpoint_picker  # needs the extra

    if settings.processes == 1:
        run_service("epp", settings, run_endpoint_picker(settings, ready=_ready))
    else:
        shared = {"--port": settings.port, "--health-port": settings.health_port}
        flags = partial(replica_flags, settings)
        run_service("epp", settings, run_process_group(settings.processes, settings.host, shared, flags))


def _ready(running: "RunningPicker") -> None:
    server = running.server
    print_ready(f"endpoint picker on port {server.port}, health on port {server.health_port}")
