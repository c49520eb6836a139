"""A Ray Serve deployment behind the example's request router, as a separate program for `test_ray_serve`.

    python -m tests.router_client.ray_serve_replicas REDIS_URL MODEL TOKENIZER REPLICAS

Prints the replicas' ids as a JSON line. Then, for each line it reads (a prompt as JSON), it prints the replica that got it.
"""

import json
import sys
import time
from types import SimpleNamespace

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig

ROUTER = "examples.ray_serve_router:KvatlasRequestRouter"
FIND_S = 120


class Completion(SimpleNamespace):
    """A completion, in the form of requests to Ray's LLM deployments."""

    def model_dump(self, exclude_none: bool = True) -> dict[str, object]:
        return dict(vars(self))


class Replica:
    """Answers with its id, as it would with tokens."""

    def __call__(self, _: object) -> str:
        return str(serve.get_replica_context().replica_id.unique_id)


def main(redis_url: str, model: str, tokenizer: str, replica_count: str) -> None:
    replicas = int(replica_count)
    ray.init(num_cpus=replicas + 2, include_dashboard=False, log_to_driver=False, object_store_memory=80 << 20)
    serve.start(proxy_location="Disabled")
    config = RequestRouterConfig(
        request_router_class=ROUTER,
        request_router_kwargs={"redis_url": redis_url, "model": model, "tokenizer": tokenizer},
    )
    deployment = serve.deployment(
        Replica, num_replicas=replicas, request_router_config=config, ray_actor_options={"num_cpus": 0.1}
    )
    handle = serve.run(deployment.bind())
    found: set[str] = set()
    until = time.monotonic() + FIND_S
    while len(found) < replicas and time.monotonic() < until:  # not a request for tokens, so any replica answers
        found.add(handle.remote("who").result())
    print(json.dumps(sorted(found)), flush=True)
    for line in sys.stdin:
        print(handle.remote(Completion(model=model, prompt=json.loads(line))).result(), flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
