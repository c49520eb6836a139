"""`kvatlas router`: an OpenAI-compatible proxy in front of the fleet's engines. `kvatlas index-server`: for other routers."""

from kvatlas.settings import IndexServerSettings, ProxySettings
from kvatlas_cli.flags import with_settings
from kvatlas_cli.process_group import replica_flags, run_process_group
from kvatlas_cli.runner import print_ready, run_service


@with_settings(ProxySettings)
def router(settings: ProxySettings) -> None:
    """Serve the OpenAI API and send each request to the engine that can answer it at the lowest cost."""
    from kvatlas_router.proxy_service import run_proxy  # needs the extra

    if settings.processes == 1:
        run_service("router", settings, run_proxy(settings, ready=print_router_ready), metrics_page=True)
        return

    def flags(number: int) -> list[str]:
        """The flags of one process. Each process gets an operators' port of its own, because a process shows only its
        own state."""
        port = settings.control_at + number if settings.control_at else 0
        return ["--control-port", str(port), *replica_flags(settings, number)]

    shared = {"--port": settings.port}
    run_service("router", settings, run_process_group(settings.processes, settings.host, shared, flags))


def print_router_ready(url: str) -> None:
    """Print the router's address."""
    print_ready(f"router at {url}; OpenAI API under {url}/v1")


@with_settings(IndexServerSettings)
def index_server(settings: IndexServerSettings) -> None:
    """Answer other routers' queries about who holds a prompt, over HTTP and gRPC. It changes nothing."""
    from kvatlas_router.queries.service import run_index_server  # needs the extra

    run_service(
        "index-server", settings, run_index_server(settings, ready=_print_index_server_ready), metrics_page=True
    )


def _print_index_server_ready(url: str, grpc_port: int | None) -> None:
    print_ready(f"index server at {url}" + ("" if grpc_port is None else f", gRPC on port {grpc_port}"))
