"""The state of one request's attempts."""

from dataclasses import dataclass

from kvatlas_router.disaggregation.pair_booker import Booked
from kvatlas_router.ejection.retry_budget import RetryBudget
from kvatlas_router.proxy.client_request import ClientRequest
from kvatlas_router.proxy.continued_answer import ContinuedAnswer
from kvatlas_router.tokens.prompt_reader import RequestPrompt
from kvatlas_router.upstream.engine_answer import EngineHangs, StreamedAnswer, WholeAnswer


@dataclass(frozen=True, slots=True)
class StalledAnswer:
    """An answer whose engine is stalled. The client gets the rest from that engine unless another worker continues the
    answer."""

    choice: Booked
    answer: StreamedAnswer
    error: EngineHangs


@dataclass(slots=True)
class Attempts:
    """One request in a pool, and the outcome of its attempts so far.

    `budget`: for retries of its tenant in this pool. `refused`: the last unsuccessful answer, with its header. `doubted`: a
    worker whose refusal may be the request's own fault, and its status. `free`: the last attempt reached no engine, so the next
    one needs no budget. `paid`: the budget has already allowed the next attempt. `apart`: two workers may compute prompt and
    answer. `read`: the prompt of the next attempt. `begun`: the client has a part of an answer. `stalled`: that answer, while
    another worker is sought for the rest. `leave_at`: from this time of the monotonic clock on, an answer may leave a stalled
    engine.
    """

    request: ClientRequest
    read: RequestPrompt
    answer: ContinuedAnswer
    pool_id: str
    budget: RetryBudget
    number: int = 0
    tried: frozenset[str] = frozenset()
    line: str = ""
    refused: tuple[WholeAnswer, tuple[bytes, bytes]] | None = None
    doubted: tuple[str, int] | None = None
    free: bool = False
    paid: bool = False
    apart: bool = True
    begun: bool = False
    stalled: StalledAnswer | None = None
    leave_at: float = 0.0
