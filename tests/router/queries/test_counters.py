"""The index server's counts of its queries."""

from contextlib import nullcontext

import pytest
from starlette.requests import ClientDisconnect

from kvatlas.errors import InvalidValue, Unreachable
from kvatlas.http.guard import BodyTooLong
from kvatlas_router.prompts.request_reader import UnknownModel
from kvatlas_router.queries.counters import QueryCounters


@pytest.mark.parametrize(
    ("error", "counted"),
    [
        (None, (1, 0, 0)),
        (InvalidValue("block_size is 0"), (0, 1, 0)),
        (UnknownModel("m"), (0, 1, 0)),
        (BodyTooLong("11", 10), (0, 1, 0)),
        (ClientDisconnect(), (0, 1, 0)),
        (Unreachable("the store"), (0, 0, 1)),
        (RuntimeError("a fault of ours"), (0, 0, 1)),
    ],
)
def test_a_question_is_answered_refused_or_fails(error: Exception | None, counted: tuple[int, int, int]) -> None:
    counters = QueryCounters()
    with nullcontext() if error is None else pytest.raises(type(error)), counters.question():
        if error is not None:
            raise error
    assert (counters.answered, counters.refused, counters.failed) == counted
