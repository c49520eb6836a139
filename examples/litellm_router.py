"""LiteLLM's Router in front of engines that kvatlas indexes; needs the extra `litellm`.

    kvatlas up --engine http://127.0.0.1:8000 --engine http://127.0.0.1:8001
    python examples/litellm_router.py llama-3-8b models/llama http://127.0.0.1:8000 http://127.0.0.1:8001

It asks two questions about a long text: the second goes to the engine that holds the text.
"""

import os
import sys

import litellm

from kvatlas_router.litellm import KvatlasRouting
from kvatlas_router.tokens import BudgetedTokenizer, ThreadedTokenizer
from kvatlas_router.tokens.local_tokenizer import LocalTokenizer
from router_client import SyncRouterClient

TEXT = "The cache holds blocks of tokens; a router asks which worker holds the most of them. " * 60


def main(model: str, tokenizer_folder: str, *engines: str) -> None:
    """`engines`: base URLs, as their publishers advertise them."""
    router = litellm.Router(
        model_list=[
            {
                "model_name": "chat",
                "litellm_params": {"model": f"hosted_vllm/{model}", "api_base": f"{engine}/v1", "api_key": "none"},
            }
            for engine in engines
        ],
        num_retries=2,
    )
    tokenizer = BudgetedTokenizer(ThreadedTokenizer(LocalTokenizer.from_folder(tokenizer_folder).prompt_tokens))
    with (
        SyncRouterClient.open(os.environ.get("KVATLAS_REDIS_URL", "redis://127.0.0.1:6379")) as client,
        KvatlasRouting(router, client, tokenizer) as routing,
    ):
        for question in ("Who holds the most?", "What does a router ask?"):
            messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": question}]
            answer = router.completion(model="chat", messages=messages, max_tokens=8)
            cached = getattr(answer.usage.prompt_tokens_details, "cached_tokens", None)
            print(f"{answer._hidden_params['api_base']}: {cached} of {answer.usage.prompt_tokens} tokens were cached")
        print(routing.counters)


if __name__ == "__main__":
    main(*sys.argv[1:])
