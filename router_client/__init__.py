"""The router client: overlap, cost and choice for routers. It needs only the plain install, without extras.

from router_client import Prompt, RouterClient, Scope

async with RouterClient.open("redis://127.0.0.1:6379") as router:
    async with router.route(Prompt.of_tokens(Scope("llama", "llama"), token_ids)) as choice:
        print(choice.url, choice.explain())

`SyncRouterClient` offers the same calls without `async` and `await`.

The path of one choice through the files is in `docs/architecture.md`. The servers that build on it are in `router/`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router_client.api import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Import the public names together on first use: importing redis-py and pydantic takes a few tenths of a second."""
    if name.startswith("__") and name != "__all__":  # names that the import system looks up on a package
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    api = import_module("router_client.api")
    globals().update({public: getattr(api, public) for public in ("__all__", *api.__all__)})
    if name in globals():
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
