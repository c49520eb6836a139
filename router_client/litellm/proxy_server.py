"""LiteLLM's proxy server, with kvatlas to choose its deployments (extra `litellm`, beside LiteLLM's own extra `proxy`).

In the proxy's configuration:

litellm_settings:
  callbacks: router_client.litellm.proxy_server.routing

and in its environment KVATLAS_REDIS_URL, and KVATLAS_TOKENIZER: a folder with the model's tokenizer.json and chat template;
without it, load decides, unless a completion brings token ids.

The proxy makes its Router itself, and again when its configuration changes; this callback takes the Router over with the next
request. While the store can't be reached LiteLLM's own strategy chooses.
"""

import asyncio
import atexit
import logging
import os
import sys
import time
from contextlib import ExitStack
from typing import Any

from litellm.integrations.custom_logger import CustomLogger

from kvatlas.errors import KvatlasError
from router_client.litellm.strategy import KvatlasRouting
from router_client.sync import SyncRouterClient
from router_client.tokens.budget import BudgetedTokenizer
from router_client.tokens.tokenizer import ThreadedTokenizer

RETRY_S = 5.0

_log = logging.getLogger("router_client.litellm")


class ProxyServerRouting(CustomLogger):  # type: ignore[misc]  # LiteLLM's types are not read
    """The callback of one proxy process."""

    def __init__(self) -> None:
        super().__init__()
        self._router: object = None
        self._open = ExitStack()
        self._next_try = 0.0
        self._lock = asyncio.Lock()

    async def async_pre_call_hook(self, user_api_key_dict: Any, cache: Any, data: Any, call_type: Any) -> None:
        """LiteLLM calls it before it routes a request."""
        if self._is_current() or time.monotonic() < self._next_try:
            return
        async with self._lock:
            if not self._is_current() and time.monotonic() >= self._next_try:
                self._next_try = time.monotonic() + RETRY_S
                await asyncio.to_thread(self._take_over, _proxy_router())

    def close(self) -> None:
        """LiteLLM chooses by itself again, and all bookings are released."""
        self._router = None
        self._open.close()

    def _is_current(self) -> bool:
        router = _proxy_router()
        return router is None or router is self._router

    def _take_over(self, router: Any) -> None:
        self.close()
        try:
            with ExitStack() as stack:
                url = os.environ.get("KVATLAS_REDIS_URL", "redis://127.0.0.1:6379")
                client = stack.enter_context(SyncRouterClient.open(url, wait=False))
                stack.enter_context(KvatlasRouting(router, client, _tokenizer()))
                self._open = stack.pop_all()
        except KvatlasError as error:
            _log.warning("kvatlas can't choose (%s); LiteLLM's own strategy does, trying again in %g s", error, RETRY_S)
            return
        self._router = router
        _log.info("LiteLLM's deployments are chosen by kvatlas")


def _proxy_router() -> Any:
    """The proxy's Router; None before it has one. Its module is imported by nobody but the proxy."""
    return getattr(sys.modules.get("litellm.proxy.proxy_server"), "llm_router", None)


def _tokenizer() -> BudgetedTokenizer | None:
    folder = os.environ.get("KVATLAS_TOKENIZER", "none")
    if folder == "none":
        return None
    from router_client.tokens.local_tokenizer import LocalTokenizer

    return BudgetedTokenizer(ThreadedTokenizer(LocalTokenizer.from_folder(folder).encode))


routing = ProxyServerRouting()
atexit.register(routing.close)
