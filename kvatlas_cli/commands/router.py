"""`kvatlas router`: an OpenAI-compatible proxy in front of the fleet's engines."""

from kvatlas.settings import ProxySettings
from kvatlas_cli.flags import with_settings
from kvatlas_cli.runner import run_service, tell


@with_settings(ProxySettings)
def router(settings: ProxySettings) -> None:
    """Answer OpenAI's API, each request by the engine that holds most of its prompt for the least work."""
    from router_client.proxy.service import run_proxy  # needs the extra

    run_service("router", settings, run_proxy(settings, ready=_ready))


def _ready(url: str) -> None:
    tell(f"router at {url}; OpenAI's API under {url}/v1")
