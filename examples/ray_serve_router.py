"""A request router for Ray Serve that asks kvatlas. NOT TESTED in a Ray cluster: it follows the interface of Ray 2.60
(`ray.serve.request_router.RequestRouter`), as its own prefix-aware router does.

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
the order that is returned, and goes on to the next if one's queue is full; so nothing is reserved here.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from router_client import KvatlasError, Prompt, RouterClient, Scope
from router_client.tokens import Api, TextRequest
from router_client.tokens.local_tokenizer import LocalTokenizer


class KvatlasRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray is not installed where types are checked
    """Replicas by what a request would cost on them, cheapest first; those that kvatlas does not know, last."""

    def initialize_state(self, redis_url: str, model: str, tokenizer: str) -> None:
        """Ray calls it with `request_router_kwargs`."""
        self._scope = Scope(model, model)
        self._tokenizer = LocalTokenizer.from_folder(tokenizer)
        self._opening = RouterClient.open(redis_url, wait=False)
        self._client: RouterClient | None = None

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of replicas, the best first."""
        request = None if pending_request is None else _text_request(pending_request.args)
        if request is None:
            return [candidate_replicas]
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        try:
            if self._client is None:
                self._client = await self._opening.__aenter__()
            ranking = await self._client.rank(Prompt.of_tokens(self._scope, self._tokenizer.encode(request)))
        except KvatlasError:
            return [candidate_replicas]
        ranks = [[by_id.pop(result.worker_id)] for result in ranking if result.worker_id in by_id]
        return [*ranks, list(by_id.values())] if by_id else ranks


def _text_request(args: tuple[Any, ...]) -> TextRequest | None:
    """The first argument that is a chat or a completion."""
    for arg in args:
        for api, name in ((Api.CHAT, "messages"), (Api.COMPLETIONS, "prompt")):
            if getattr(arg, name, None):
                return TextRequest(api, arg.model_dump(exclude_none=True))
    return None
