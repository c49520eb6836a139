"""Chooses and books deployments for LiteLLM's Router, in a router client's event loop."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from kvatlas.errors import KvatlasError
from kvatlas.identity import Scope
from kvatlas_router.held_bookings import HeldBookings, HeldCounters
from kvatlas_router.litellm.deployments import (
    Deployment,
    add_headers,
    by_engine_model,
    by_worker,
    read_request,
    with_reservation,
)
from kvatlas_router.tokens.prompt_reader import PromptReader
from kvatlas_router.tokens.text_request import Api
from router_client.client import RouterClient
from router_client.decision.selector import Selector
from router_client.learning.timings import Timings
from router_client.learning.token_counts import Usage

_log = logging.getLogger("kvatlas_router.litellm")


class DeploymentChooser:
    """Chooses for one LiteLLM Router. All calls run in the client's event loop."""

    def __init__(
        self,
        client: RouterClient,
        prompts: PromptReader,
        scope_of: Callable[[str], Scope],
        providers: Collection[str],
        counters: HeldCounters,
        held_s: float,
    ) -> None:
        """`providers`: the prefixes that LiteLLM puts before a model's name and a slash."""
        self._client = client
        self._prompts = prompts
        self._scope_of = scope_of
        self._providers = providers
        self._held = HeldBookings(client, counters, held_s=held_s)

    def __len__(self) -> int:
        """Number of bookings whose end has not been reported yet."""
        return len(self._held)

    async def choose(
        self,
        healthy: Sequence[Deployment],
        messages: Sequence[dict[str, Any]],
        request_kwargs: dict[str, Any],
        api: Api,
    ) -> Deployment | None:
        """Book the cheapest worker and return its deployment; None if LiteLLM should choose."""
        try:
            request = read_request(api, messages, request_kwargs)
            ours = []
            for model, deployments in by_engine_model(healthy, self._providers).items():
                scope = self._scope_of(model)
                if self._prompts.settings.salt_is_tenant and request.cache_salt is not None:
                    scope = replace(scope, tenant_id=request.cache_salt)
                if served := by_worker(deployments, await self._client.workers(scope)):
                    ours.append((model, scope, served))
            if len(ours) != 1:  # costs of different models don't compare
                return None
            model, scope, served = ours[0]
            read = await self._prompts.read(replace(request, body={**request.body, "model": model}), scope)
            held_id, choice = await self._held.book(replace(read.prompt, select=Selector(allow=served.keys())))
        except KvatlasError as error:
            _log.warning("kvatlas can't choose (%s); leaving the choice to LiteLLM's own strategy", error)
            return None
        add_headers(request_kwargs, choice.headers)
        return with_reservation(served[choice.worker_id], held_id, choice.headers)

    async def first_token(self, held_id: str) -> None:
        """Record that the request's prefill is over."""
        await self._held.first_token(held_id)

    async def end(self, held_id: str, usage: Usage | None, timings: Timings | None, *, well: bool) -> None:
        """Record that the request is over; `well`: it was answered."""
        self._held.end(held_id, usage, timings, well=well)

    async def close(self) -> None:
        """Release all bookings."""
        await self._held.close()
