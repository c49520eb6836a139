"""Counters of the index server."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from starlette.requests import ClientDisconnect

from kvatlas.errors import KvatlasError, Unreachable
from kvatlas.http.guard import BodyTooLong
from kvatlas.telemetry.distribution import Distribution
from kvatlas_router.tenancy.refusals import KeysUnknown


@dataclass
class QueryCounters:
    """Queries over HTTP and gRPC: plain integers since the server started.

    Queries are `answered`, `refused` (the query or its sender is at fault) or `failed` (for instance because the store is
    down). `answer_time`: seconds taken for each. `changes`: changes sent to followers that keep a copy.
    """

    answered: int = 0
    refused: int = 0
    failed: int = 0
    changes: int = 0
    answer_time: Distribution = field(default_factory=Distribution)

    @contextmanager
    def question(self) -> Iterator[None]:
        """Count the outcome of one query, which the block is to answer."""
        began = perf_counter()
        try:
            yield
        except (Unreachable, KeysUnknown):
            self.failed += 1
            raise
        except (KvatlasError, ClientDisconnect, BodyTooLong):
            self.refused += 1
            raise
        except Exception:
            self.failed += 1
            raise
        self.answered += 1
        self.answer_time.add(perf_counter() - began)
