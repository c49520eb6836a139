"""Lets kvatlas choose the deployments of LiteLLM's proxy server (extra `litellm`, besides LiteLLM's own extra `proxy`).

In the proxy's configuration:

litellm_settings:
  callbacks: kvatlas_router.litellm.proxy_server.routing

and in its environment KVATLAS_REDIS_URL, and KVATLAS_TOKENIZER: a folder with the model's tokenizer.json and chat template.
Without a tokenizer, load decides unless a completion has token ids.

The proxy makes its own Router, and a new one when its configuration changes. This callback takes it over at the next request.
While the store can't be reached, LiteLLM's own strategy chooses.
"""

import asyncio
import atexit
import logging
import os
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterable
from contextlib import ExitStack, suppress
from typing import Any

from litellm.integrations.custom_logger import CustomLogger

from kvatlas.errors import KvatlasError
from kvatlas_router.litellm.strategy import KvatlasRouting
from kvatlas_router.tokens.budget import BudgetedTokenizer
from kvatlas_router.tokens.tokenizer import ThreadedTokenizer
from router_client.sync import SyncRouterClient

RETRY_S = 5.0

_log = logging.getLogger("kvatlas_router.litellm")


class _EndOfStream:
    """Ends the booking of a stream that is not read to its end. `is_reported`: LiteLLM reports the end, or it was reported
    here."""

    def __init__(self, strategy: KvatlasRouting, request: dict[str, Any]) -> None:
        self.is_reported = False
        self._strategy = strategy
        self._request = request

    def report(self) -> None:
        """Report that the stream is over."""
        if not self.is_reported:
            self._strategy.end_last_try(self._request)
        self.is_reported = True

    def watch(self, stream: Any) -> None:
        """Also report when LiteLLM closes the stream, which it does at once if the client disconnects. Generators around the
        stream are closed only later, by garbage collection."""
        close = getattr(stream, "aclose", None)

        async def aclose() -> None:
            self.report()
            if close is not None:
                await close()

        with suppress(AttributeError):  # another callback's generator: only garbage collection will close it
            stream.aclose = aclose


class ProxyServerRouting(CustomLogger):  # type: ignore[misc]  # LiteLLM's types are not read
    """The callback of one proxy process. `strategy`: chooses for the proxy's current Router; None before it was taken over."""

    def __init__(self) -> None:
        super().__init__()
        self.strategy: KvatlasRouting | None = None
        self._router: object = None
        self._open = ExitStack()
        self._next_try = 0.0
        self._lock = asyncio.Lock()

    async def async_pre_call_hook(self, user_api_key_dict: Any, cache: Any, data: Any, call_type: Any) -> None:
        """LiteLLM calls this before it routes a request."""
        if self._is_current() or time.monotonic() < self._next_try:
            return
        async with self._lock:
            if not self._is_current() and time.monotonic() >= self._next_try:
                self._next_try = time.monotonic() + RETRY_S
                await asyncio.to_thread(self._take_over, _proxy_router())

    async def async_post_call_failure_hook(
        self, request_data: dict[str, Any], original_exception: Any, user_api_key_dict: Any, traceback_str: Any = None
    ) -> None:
        """Handle a request whose client gets an error, or disconnected. Elsewhere LiteLLM reports only the first failure of
        several tries."""
        if self.strategy is not None:
            self.strategy.end_last_try(request_data)

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: AsyncIterable[Any], request_data: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """Pass a stream to its client, watching its end. LiteLLM itself reports only streams that are read to their end."""
        strategy = self.strategy
        if strategy is None:
            async for part in response:
                yield part
            return
        end = _EndOfStream(strategy, request_data)
        end.watch(response)
        first = True
        try:
            async for part in response:
                if first:
                    strategy.report_first_token(request_data)
                    first = False
                yield part
            end.is_reported = True
        finally:
            end.report()

    def close(self) -> None:
        """Give the choice back to LiteLLM, and release all bookings."""
        self._router = self.strategy = None
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
                strategy = stack.enter_context(KvatlasRouting(router, client, _tokenizer()))
                self._open = stack.pop_all()
        except KvatlasError as error:
            _log.warning("kvatlas can't choose (%s); LiteLLM's own strategy does, trying again in %g s", error, RETRY_S)
            return
        self._router, self.strategy = router, strategy
        _log.info("LiteLLM's deployments are chosen by kvatlas")


def _proxy_router() -> Any:
    """The proxy's Router; None before it has one. Only the proxy itself imports its module."""
    return getattr(sys.modules.get("litellm.proxy.proxy_server"), "llm_router", None)


def _tokenizer() -> BudgetedTokenizer | None:
    folder = os.environ.get("KVATLAS_TOKENIZER", "none")
    if folder == "none":
        return None
    from kvatlas_router.tokens.local_tokenizer import LocalTokenizer

    return BudgetedTokenizer(ThreadedTokenizer(LocalTokenizer.from_folder(folder).prompt_tokens))


routing = ProxyServerRouting()
atexit.register(routing.close)
