"""A request router for Ray Serve that asks kvatlas, for Ray 2.60 (`ray.serve.request_router.RequestRouter`).

`make integrations` runs it in a deployment on one machine. With engines of `ray.serve.llm`, which need GPUs, it was NOT TESTED.

    from ray.serve.config import RequestRouterConfig
    from ray.serve.llm import LLMConfig

    LLMConfig(
        ...,
        deployment_config={
            "request_router_config": RequestRouterConfig(
                request_router_class="ray_serve_router:KvatlasRequestRouter",
                request_router_kwargs={"redis_url": "redis://10.0.0.5:6379", "model": "llama", "tokenizer": "models/llama"},
            )
        },
    )

Each replica needs a publisher for its engine: `kvatlas publish --worker-id` with the replica's unique id. Ray asks replicas in
the returned order, and continues with the next if a replica's queue is full; so nothing is reserved here.
"""

import asyncio
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from kvatlas_router.tokens import Api, TextRequest
from kvatlas_router.tokens.local_tokenizer import LocalTokenizer
from router_client import KvatlasError, Prompt, RouterClient, Scope


class KvatlasRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray is not installed where types are checked
    """Orders replicas by what a request would cost on them, cheapest first; replicas that kvatlas does not know come last."""

    def initialize_state(self, redis_url: str, model: str, tokenizer: str) -> None:
        """Ray calls it with `request_router_kwargs`."""
        self._scope = Scope(model, model)
        self._tokenizer = LocalTokenizer.from_folder(tokenizer)
        self._redis_url = redis_url
        self._client: RouterClient | None = None
        self._opening = asyncio.Lock()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Groups of replicas, the best first."""
        request = None if pending_request is None else _text_request(pending_request.args)
        if request is None:
            return [candidate_replicas]
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        try:
            client = await self._open()
            ranking = await client.rank(Prompt.of_tokens(self._scope, self._tokenizer.encode(request)))
        except KvatlasError:
            return [candidate_replicas]
        ranks = [[by_id.pop(result.worker_id)] for result in ranking if result.worker_id in by_id]
        return [*ranks, list(by_id.values())] if by_id else ranks

    async def _open(self) -> RouterClient:
        """The client of this router's event loop; it stays open as long as the process runs."""
        async with self._opening:
            if self._client is None:
                self._open_client = RouterClient.open(self._redis_url, wait=False)
                self._client = await self._open_client.__aenter__()
        return self._client


def _text_request(args: tuple[Any, ...]) -> TextRequest | None:
    """The first argument that is a chat or a completion."""
    for arg in args:
        for api, name in ((Api.CHAT, "messages"), (Api.COMPLETIONS, "prompt")):
            if getattr(arg, name, None):
                return TextRequest(api, arg.model_dump(exclude_none=True))
    return None
