"""Earlier names of calls, kept for a while with a DeprecationWarning: `book` and `pick` of clients (now `reserve`), `finish`
and `fail` of choices (now `done`)."""

import warnings
from collections.abc import Collection, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from router_client.learning.timings import Timings
from router_client.learning.usage import Usage

RequestT = TypeVar("RequestT", contravariant=True)
"""What is reserved for, and what a reservation of one worker, and of a pair, returns."""
OneT = TypeVar("OneT", covariant=True)
PairT = TypeVar("PairT", covariant=True)
EndT = TypeVar("EndT", covariant=True)


class Reserves(Protocol[RequestT, OneT, PairT]):
    """A client's calls."""

    def reserve(self, request: RequestT, *, avoid: Collection[str] = (), dry_run: bool = False) -> OneT: ...
    def reserve_pd(self, request: RequestT, *, avoid: Collection[str] = (), dry_run: bool = False) -> PairT: ...


class Ends(Protocol[EndT]):
    """A choice's call."""

    def done(self, status: int = 200, usage: Usage | None = None, timings: Timings | None = None) -> EndT: ...


class ClientAliases(Generic[RequestT, OneT, PairT]):
    """Of a client; coroutines where the client's calls are."""

    __slots__ = ()

    def book(self: Reserves[RequestT, OneT, PairT], request: RequestT, *, avoid: Collection[str] = ()) -> OneT:
        """Now `reserve`."""
        _warn("book", "reserve")
        return self.reserve(request, avoid=avoid)

    def pick(self: Reserves[RequestT, OneT, PairT], request: RequestT, *, avoid: Collection[str] = ()) -> OneT:
        """Now `reserve` with `dry_run`."""
        _warn("pick", "reserve(..., dry_run=True)")
        return self.reserve(request, avoid=avoid, dry_run=True)

    def book_pd(self: Reserves[RequestT, OneT, PairT], request: RequestT, *, avoid: Collection[str] = ()) -> PairT:
        """Now `reserve_pd`."""
        _warn("book_pd", "reserve_pd")
        return self.reserve_pd(request, avoid=avoid)

    def pick_pd(self: Reserves[RequestT, OneT, PairT], request: RequestT, *, avoid: Collection[str] = ()) -> PairT:
        """Now `reserve_pd` with `dry_run`."""
        _warn("pick_pd", "reserve_pd(..., dry_run=True)")
        return self.reserve_pd(request, avoid=avoid, dry_run=True)


class ChoiceAliases(Generic[EndT]):
    """Of a choice; coroutines where its `done` is."""

    __slots__ = ()

    def finish(self: Ends[EndT], usage: Usage | None = None, timings: Timings | None = None) -> EndT:
        """Now `done`."""
        _warn("finish", "done")
        return self.done(usage=usage, timings=timings)

    def fail(self: Ends[EndT]) -> EndT:
        """Now `done` with the answer's status, or 0 without an answer."""
        _warn("fail", "done(status)")
        return self.done(status=0)


AsyncEnd = Coroutine[Any, Any, None]


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}; the old name will go in a later version", DeprecationWarning, stacklevel=3)
