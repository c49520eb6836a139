"""A request to an engine, its tokens, and the errors that refuse it."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from kvatlas.errors import InvalidValue, KvatlasError
from kvatlas_simulator.cache.block_hash import Namespace

FinishReason: TypeAlias = Literal["length", "stop"]
"""Synthetic tokens contain no stop token: every answer has `max_tokens` tokens, unless a stop string comes first."""


class QueueFull(KvatlasError):
    """The queue of waiting requests is full."""


class RequestTooLarge(InvalidValue):
    """The request could never run on this engine."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt with `choices` answers of `max_tokens` tokens each. As in vLLM, the seed of a choice is `seed` plus its index.

    `received_tokens`: prompt tokens whose KV came from another engine; the last token is computed in any case. `holds`: the
    request's blocks are held after it ends, until `release`.
    """

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    namespace: Namespace = field(default_factory=Namespace)
    choices: int = 1
    seed: int = 0
    received_tokens: int = 0
    holds: bool = False


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One token of one answer, at the end of the step that computed it."""

    request_id: str
    choice: int
    token_id: int
    cached_tokens: int
    """Number of prompt tokens that came from the cache when the request was first scheduled."""
    finish_reason: FinishReason | None
