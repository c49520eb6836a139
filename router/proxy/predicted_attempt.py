"""Predicts how long an attempt should take, as a basis for judging its engine's progress."""

from collections.abc import Callable

from kvatlas_router.progress.watched_attempt import STREAMED, WHOLE, SentAttempt, stays
from kvatlas_router.proxy.engine_call import INFERENCE
from kvatlas_router.tokens.text_request import TextRequest
from router_client.results import Choice

_BY_THE_SERVER = frozenset({"/tokenize", "/detokenize", "/v1/messages/count_tokens"})
"""Calls that an engine's HTTP server answers without computing."""


def sent_attempt(
    choice: Choice, path: str, text: TextRequest | None, may_move: Callable[[frozenset[str], bool], bool] = stays
) -> SentAttempt:
    """The attempt with its predicted time to the first byte, which arrives with the first token of a stream, or with the
    last token of any other answer. Times of other calls are not predicted, but learned for each path."""
    endpoint = choice.endpoint
    predicted_us: int | None = None
    if text is None:
        kind = path
    elif text.streamed:
        kind, predicted_us = STREAMED, choice.ttft_us
    else:
        kind, predicted_us = WHOLE, choice.score_us
    predicted_s = None if predicted_us is None else predicted_us / 1e6
    computes = path in INFERENCE and path not in _BY_THE_SERVER
    return SentAttempt(endpoint.id, endpoint.pool_id, kind, predicted_s, computes, may_move)
