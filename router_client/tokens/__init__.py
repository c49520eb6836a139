"""From a request as OpenAI's API has it to the token ids that its engine will compute: what a router hashes.

    text_request.py   the body of a completion or a chat, as far as a router reads it
    tokenizer.py      the protocol, and tokenizers made of the caller's own function
    budget.py         a deadline and a bound on what waits, around any tokenizer
    local.py          a Hugging Face tokenizer and its chat template (extra `tokenizer`)
    engine.py         the engine's own `/tokenize` (extra `router`)
    usage.py          what engines say of tokens in their answers
    counters.py       how requests came by their token ids

Importing this package needs the plain install alone; `local` and `engine` are imported by name.
"""

from router_client.tokens.budget import BudgetedTokenizer, TokenizerBudget
from router_client.tokens.counters import TokenCounters
from router_client.tokens.text_request import Api, TextRequest
from router_client.tokens.tokenizer import AwaitedTokenizer, CannotTokenize, ThreadedTokenizer, Tokenizer, Why
from router_client.tokens.usage import Usage

__all__ = [
    "Api",
    "AwaitedTokenizer",
    "BudgetedTokenizer",
    "CannotTokenize",
    "TextRequest",
    "ThreadedTokenizer",
    "TokenCounters",
    "Tokenizer",
    "TokenizerBudget",
    "Usage",
    "Why",
]
