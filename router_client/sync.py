"""The router client for threads: the same calls as `RouterClient`, which runs in its own loop.

with SyncRouterClient.open("redis://127.0.0.1:6379") as router:
    with router.route(Prompt.of_tokens(Scope("llama", "llama"), token_ids)) as choice:
        print(choice.url, choice.explain())
"""

from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack, contextmanager
from dataclasses import field, fields
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from kvatlas.cost.learned_rates import LearnedRates
from kvatlas.dataclass import dataclass
from kvatlas.identity import Scope
from kvatlas.store.access import RedisAccess
from router_client.client import Request, RouterClient
from router_client.counters import RouterCounters
from router_client.decision.history import DecisionHistory
from router_client.errors import ClientClosed
from router_client.learning.condition import ConditionMeter
from router_client.learning.prediction_accuracy import PredictionAccuracy
from router_client.learning.timings import Timings
from router_client.learning.token_counts import Usage
from router_client.loop_thread import LoopThread
from router_client.prefill_decode_result import PairChoice, PairChoiceData
from router_client.request_feed import RequestFeed
from router_client.results import Choice, ChoiceData
from router_client.settings import RouterSettings

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SyncChoice(ChoiceData):
    """A choice of `SyncRouterClient`: `Choice`, for threads."""

    _choice: Choice = field(kw_only=True, compare=False, repr=False)
    _thread: LoopThread = field(kw_only=True, compare=False, repr=False)

    def first_token(self) -> None:
        """Report the first token: the prompt is no longer waiting at the worker. Does nothing if nothing is booked."""
        self._run(self._choice.first_token)

    def done(
        self,
        status: int = 200,
        usage: Usage | None = None,
        timings: Timings | None = None,
        whole: Usage | None = None,
    ) -> None:
        """Report the end of the request; see `Choice.done`. Exiting the block of `route` does the same."""
        self._run(self._choice.done, status, usage, timings, whole)

    def _run(self, report: Callable[P, Coroutine[Any, Any, None]], *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            self._thread.run(report, *args, **kwargs)
        except ClientClosed:
            if not self._thread.closed:  # a closed client has already released its bookings
                raise


@dataclass(frozen=True, slots=True)
class SyncPairChoice(PairChoiceData):
    """A choice of `SyncRouterClient`: `PairChoice`, for threads."""

    decode: SyncChoice
    prefill: SyncChoice | None
    _pair: PairChoice = field(kw_only=True, compare=False, repr=False)

    def first_token(self) -> None:
        """Report the first token: the prefill worker is free again."""
        self.decode._run(self._pair.first_token)

    def done(
        self,
        status: int = 200,
        usage: Usage | None = None,
        timings: Timings | None = None,
        whole: Usage | None = None,
    ) -> None:
        """Report the end of the request; see `Choice.done`. Exiting the block of `route_pd` does the same."""
        self.decode._run(self._pair.done, status, usage, timings, whole)


_DATA_FIELDS = tuple(field.name for field in fields(ChoiceData))


def _wrap(choice: Choice, thread: LoopThread) -> SyncChoice:
    """Wrap a choice that was made in the thread's loop."""
    return SyncChoice(*(getattr(choice, name) for name in _DATA_FIELDS), _choice=choice, _thread=thread)


def _wrap_pair(pair: PairChoice, thread: LoopThread) -> SyncPairChoice:
    prefill = None if pair.prefill is None else _wrap(pair.prefill, thread)
    return SyncPairChoice(_wrap(pair.decode, thread), prefill, pair.ranking, _pair=pair)


def _waiting(
    call: Callable[Concatenate[RouterClient, P], Coroutine[Any, Any, T]],
) -> "Callable[Concatenate[SyncRouterClient, P], T]":
    """The call for threads, which waits for the result."""

    @wraps(call)
    def wait(router: "SyncRouterClient", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return router._thread.run(call, router._client, *args, **kwargs)

    return wait


class SyncRouterClient:
    """`RouterClient` for threads: each call waits for the same call of an async client, which lives in its own loop and
    thread while the `with` block runs.

    Any number of threads may share it; their calls run concurrently, over one pool of connections. It does not survive a
    fork: a server that forks opens one in each process, after the fork. Calls raise what those of `RouterClient` raise, and
    also ClientClosed outside the block or in another process. Code in the settings (a policy, a profile) runs in the loop's
    thread, and must not call this client.
    """

    def __init__(self, client: AbstractAsyncContextManager[RouterClient]) -> None:
        """`client`: must not be used by anything else, and must not have been entered yet."""
        self._unentered = client
        self._stack = ExitStack()
        self._open: tuple[RouterClient, LoopThread] | None = None

    @classmethod
    def open(
        cls,
        redis: RedisAccess | str,
        settings: RouterSettings | None = None,
        *,
        wait: bool = True,
        on_wait: Callable[[str], None] | None = None,
    ) -> Self:
        """`with SyncRouterClient.open(url) as router`: see `RouterClient.open`. Entering raises that call's errors."""
        return cls(RouterClient.open(redis, settings, wait=wait, on_wait=on_wait))

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            thread = stack.enter_context(LoopThread("kvatlas router client"))
            self._open = stack.enter_context(thread.enter(self._unentered)), thread
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open = None
        self._stack.close()

    @property
    def settings(self) -> RouterSettings:
        return self._client.settings

    @property
    def counters(self) -> RouterCounters:
        return self._client.counters

    @property
    def history(self) -> DecisionHistory:
        """See `RouterClient.history`."""
        return self._client.history

    @property
    def replica_status(self) -> Mapping[str, Any] | None:
        """See `RouterClient.replica_status`."""
        return self._client.replica_status

    @property
    def feed(self) -> RequestFeed:
        """See `RouterClient.feed`; the feed is followed in the client's event loop."""
        return self._client.feed

    @property
    def answers(self) -> PredictionAccuracy:
        """See `RouterClient.answers`."""
        return self._client.answers

    @property
    def condition(self) -> ConditionMeter:
        """See `RouterClient.condition`."""
        return self._client.condition

    @property
    def load_only(self) -> bool:
        """The kill switch: if True, choices are made by load alone, without the index. May be set at any time."""
        return self._client.load_only

    @load_only.setter
    def load_only(self, on: bool) -> None:
        self._client.load_only = on

    @property
    def router_id(self) -> str:
        """The name of this router's lease."""
        return self._client.router_id

    workers = _waiting(RouterClient.workers)
    record_end = _waiting(RouterClient.record_end)
    find_booked = _waiting(RouterClient.find_booked)
    locate = _waiting(RouterClient.locate)
    children = _waiting(RouterClient.children)
    overlap = _waiting(RouterClient.overlap)
    rank = _waiting(RouterClient.rank)
    turns = _waiting(RouterClient.turns)

    def rates(self, scope: Scope) -> Mapping[str, LearnedRates]:
        """See `RouterClient.rates`."""
        return self._client.rates(scope)

    def reserve(self, request: Request, *, avoid: Collection[str] = (), dry_run: bool = False) -> SyncChoice:
        """The cheapest worker, reserved until `choice.done()`. For callers that can't use `route`.

        `avoid`: workers that must not be chosen. `dry_run`: nothing is reserved. Raises NoWorkers.
        """
        return _wrap(self._thread.run(self._client.reserve, request, avoid=avoid, dry_run=dry_run), self._thread)

    @contextmanager
    def route(self, request: Request, *, avoid: Collection[str] = ()) -> Iterator[SyncChoice]:
        """`with router.route(request) as choice`: the cheapest worker, reserved while the block runs.

        Call `choice.first_token()` when the prefill is over. Exiting the block ends the request (as failed, if an exception
        caused the exit). Raises NoWorkers.
        """
        choice = self.reserve(request, avoid=avoid)
        try:
            yield choice
        except BaseException:
            choice.done(status=0)
            raise
        choice.done()

    def reserve_pd(self, request: Request, *, avoid: Collection[str] = (), dry_run: bool = False) -> SyncPairChoice:
        """The pair that `route_pd` would choose, reserved until `pair.done()`; see `reserve`. Raises NoWorkers."""
        return _wrap_pair(
            self._thread.run(self._client.reserve_pd, request, avoid=avoid, dry_run=dry_run), self._thread
        )

    @contextmanager
    def route_pd(self, request: Request, *, avoid: Collection[str] = ()) -> Iterator[SyncPairChoice]:
        """`with router.route_pd(request) as pair`: the workers for prompt and answer, both reserved while the block runs.

        Raises NoWorkers.
        """
        pair = self.reserve_pd(request, avoid=avoid)
        try:
            yield pair
        except BaseException:
            pair.done(status=0)
            raise
        pair.done()

    def submit(
        self,
        function: Callable[Concatenate[RouterClient, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Future[T]:
        """Call an async function with the async client, in its loop, without waiting for it."""
        return self._thread.submit(function, self._client, *args, **kwargs)

    @property
    def _client(self) -> RouterClient:
        return self._entered()[0]

    @property
    def _thread(self) -> LoopThread:
        return self._entered()[1]

    def _entered(self) -> tuple[RouterClient, LoopThread]:
        if self._open is None:
            raise ClientClosed("the router client is not open; use it in a `with` block")
        return self._open
