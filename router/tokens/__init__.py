"""Turns an OpenAI request's body into the token ids that its engine will compute, which a router hashes.

    text_request.py      the body of a completion or a chat, as much of it as a router needs
    tokenizer.py         the protocol, and tokenizers that call the caller's own function
    budget.py            a deadline and a bound on pending prompts, for any tokenizer
    prompt_reader.py     turns a body into a `Prompt` in a known scope
    local_tokenizer.py   a Hugging Face tokenizer and its chat template, chat_template.py (extra `tokenizer`)
    engine_tokenizer.py  the engine's own `/tokenize`, and its rendering of chats with images (extra `router`)
    counters.py          counts where requests' token ids came from

Importing this package needs only the plain install; import `local_tokenizer` and `engine_tokenizer` by name.
"""

from kvatlas_router.tokens.budget import BudgetedTokenizer, TokenizerBudget
from kvatlas_router.tokens.counters import TokenCounters
from kvatlas_router.tokens.text_request import Api, TextRequest
from kvatlas_router.tokens.tokenizer import (
    AwaitedTokenizer,
    CannotTokenize,
    PromptTokens,
    ThreadedTokenizer,
    Tokenizer,
    Why,
)
from router_client.learning.token_counts import Usage

__all__ = [
    "Api",
    "AwaitedTokenizer",
    "BudgetedTokenizer",
    "CannotTokenize",
    "PromptTokens",
    "TextRequest",
    "ThreadedTokenizer",
    "TokenCounters",
    "Tokenizer",
    "TokenizerBudget",
    "Usage",
    "Why",
]
