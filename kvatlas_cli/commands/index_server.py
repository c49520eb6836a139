"""`kvatlas index-server`: who holds what, for other people's routers."""

from kvatlas.settings import IndexServerSettings
from kvatlas_cli.flags import with_settings
from kvatlas_cli.output import print_notice
from kvatlas_cli.runner import run_service


@with_settings(IndexServerSettings)
def index_server(settings: IndexServerSettings) -> None:
    """Answer other routers' questions who holds a prompt, over HTTP and gRPC. It changes nothing."""
    from kvatlas_router.queries.service import run_index_server  # needs the extra

    run_service("index-server", settings, run_index_server(settings, ready=_ready), metrics_page=True)


def _ready(url: str, grpc_port: int | None) -> None:
    print_notice(f"index server at {url}" + ("" if grpc_port is None else f", gRPC on port {grpc_port}"))
