"""`kvatlas router`: an OpenAI-compatible proxy in front of the fleet's engines."""

from kvatlas.settings import ProxySettings
from kvatlas_cli.flags import with_settings
from kvatlas_cli.output import print_notice
from kvatlas_cli.process_group import run_process_group
from kvatlas_cli.runner import run_service


@with_settings(ProxySettings)
def router(settings: ProxySettings) -> None:
    """Serve the OpenAI API and send each request to the engine on which it costs least."""
    from kvatlas_router.proxy_service import run_proxy  # needs the extra

    if settings.processes == 1:
        run_service("router", settings, run_proxy(settings, ready=print_router_ready), metrics_page=True)
        return

    def flags(number: int) -> list[str]:
        """The port for operators counts up: what it shows is one process' own."""
        return ["--control-port", str(settings.control_at + number if settings.control_at else 0)]

    shared = {"--port": settings.port}
    run_service("router", settings, run_process_group(settings.processes, settings.host, shared, flags))


def print_router_ready(url: str) -> None:
    """Say where it takes requests."""
    print_notice(f"router at {url}; OpenAI API under {url}/v1")
