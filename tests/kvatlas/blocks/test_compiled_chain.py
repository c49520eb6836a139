"""The compiled hash chain and the Python code give the same bytes or the same error, whatever they are given."""

import gc
import sys
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvatlas.blocks import hashing
from kvatlas.blocks.hashing import MAX_TOKEN_ID, SEED, extend_chain

if not hashing.is_compiled():
    pytest.skip("kvatlas was installed without a C compiler", allow_module_level=True)

from kvatlas.blocks._hash_chain import extend


class Number(int):
    """An int that may compute anything."""

    def __index__(self) -> int:
        raise RuntimeError("no index")


class Index:
    """No int, but taken as one. Before it answers, it may change the list that it is in."""

    def __init__(self, value: object, change: Callable[[list[Any]], object] = len) -> None:
        self.value = value
        self.change = change
        self.tokens: list[Any] = []

    def __index__(self) -> int:
        self.change(self.tokens)
        if isinstance(self.value, Exception):
            raise self.value
        return self.value  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"Index({self.value!r})"


class Tokens(list[Any]):
    """A list that has other items than it holds."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        return iter([1, 2, 3, 4])

    def __getitem__(self, at: Any) -> Any:
        return 7


def shrink(tokens: list[Any]) -> None:
    del tokens[1:]
    gc.collect()


ordinary = st.integers(0, MAX_TOKEN_ID) | st.sampled_from([0, 1, 2**15, 2**30 - 1, 2**30, 2**31, MAX_TOKEN_ID])
odd = st.one_of(
    st.integers(-(2**70), 2**70),
    st.sampled_from([-1, MAX_TOKEN_ID + 1, 2**63, 2**64 - 1, 2**64, -(2**63), 10**400]),
    st.booleans(),
    st.none(),
    st.floats(),
    st.text(max_size=2),
    st.binary(max_size=2),
    st.builds(Number, st.integers(0, 9)),
    st.builds(Index, st.sampled_from([3, True, -1, 2**32, 2**64, "x", ValueError("no"), OverflowError("too large")])),
    st.builds(list, st.just([1])),
)
sizes = st.integers(1, 40) | st.sampled_from([64, 100, 300, 2**31, 2**62, 2**64, True])
parents = st.none() | st.integers(0, 2**64 - 1) | st.sampled_from([-1, 2**64, True, 1.5, "7"])


def wide(values: Sequence[int]) -> memoryview:
    """Every second item of a buffer."""
    return memoryview(array("I", [item for value in values for item in (value, 9)]))[::2]


containers: list[Callable[[list[int]], Any]] = [
    list,
    tuple,
    Tokens,
    deque,
    wide,
    lambda values: array("I", values),
    lambda values: array("L", values),
    lambda values: array("Q", values),
    lambda values: array("d", values),
    lambda values: memoryview(array("I", values)),
    lambda values: memoryview(array("I", values)).cast("B"),
    lambda values: memoryview(b"x" + array("I", values).tobytes())[1:],
    lambda values: array("I", values).tobytes(),
    lambda values: bytearray(array("I", values).tobytes()),
    lambda values: dict.fromkeys(values),
    lambda values: range(len(values)),
    lambda values: str(values),
]


def outcome(tokens: Any, size: Any, parent: Any) -> object:
    """The chain, or the error."""
    try:
        return extend_chain(tokens, size, parent)
    except Exception as error:  # noqa: BLE001 - the same, whatever it is
        return type(error), str(error)


def both(make: Callable[[], Any], size: Any, parent: Any) -> tuple[object, object]:
    """The outcomes of the compiled code and of the Python code, each with tokens of its own."""
    with pytest.MonkeyPatch.context() as patch:
        compiled = outcome(make(), size, parent)
        patch.setattr(hashing, "_extend_compiled", None)
        return compiled, outcome(make(), size, parent)


@given(st.lists(ordinary, max_size=700), sizes, parents, st.sampled_from(containers))
def test_any_sequence_of_tokens_has_the_same_outcome(tokens: list[int], size: Any, parent: Any, kind: Any) -> None:
    compiled, python = both(lambda: kind(tokens), size, parent)
    assert compiled == python


@given(
    st.lists(ordinary, max_size=60),
    st.lists(st.tuples(st.integers(0, 60), odd), min_size=1, max_size=3),
    sizes,
    parents,
)
def test_odd_values_among_tokens_have_the_same_outcome(
    tokens: list[int], odd_ones: list[tuple[int, Any]], size: Any, parent: Any
) -> None:
    mixed: list[Any] = list(tokens)
    for at, value in odd_ones:
        mixed.insert(at, value)
    for kind in (list, tuple):
        compiled, python = both(lambda kind=kind: kind(mixed), size, parent)  # type: ignore[misc]
        assert compiled == python


@pytest.mark.parametrize("change", [shrink, list.clear, lambda tokens: tokens.extend([1] * 5_000)])
@pytest.mark.parametrize("at", [0, 17, 39, 41])
def test_a_list_that_changes_while_it_is_read_has_the_same_outcome(change: Any, at: int) -> None:
    def make() -> list[Any]:
        tokens: list[Any] = [2**40 + number for number in range(42)] if at == 39 else list(range(42))
        tokens[at] = Index(5, change)
        tokens[at].tokens = tokens
        return tokens

    compiled, python = both(make, 8, None)
    assert compiled == python


@given(st.lists(st.one_of(ordinary, odd, st.lists(ordinary), st.tuples(ordinary, ordinary)), max_size=5))
def test_the_compiled_code_refuses_any_other_call(arguments: list[Any]) -> None:
    assert extend(*arguments) is None or isinstance(extend(*arguments), bytes)


def test_blocks_of_every_length_have_their_hash() -> None:
    """XXH3 treats 4 to 8, 9 to 16, 17 to 128, 129 to 240 and more bytes differently, and more than 1,024 in parts."""
    tokens = [(at * 2_654_435_761) & MAX_TOKEN_ID for at in range(2_100)]
    for size in [*range(1, 600), 767, 768, 769, 1_024, 2_047, 2_048, 2_049]:
        packed = array("I", tokens[:size])
        expected = xxhash.xxh3_64_digest(packed.tobytes(), SEED)[::-1]
        assert extend(tokens[:size], size, None) == extend(packed, size, None) == expected, size


def test_nothing_is_leaked() -> None:
    tokens, packed = [2**31 + at for at in range(64)], array("I", range(64))
    before = [sys.getrefcount(one) for one in (tokens, packed, tokens[5], None)]
    calls: list[tuple[Any, ...]] = [(tokens, 16, 3), (packed, 16, None), ([*tokens, "x"], 16, None), (b"1", 1, 1), ()]
    for _ in range(1_000):
        for arguments in calls:
            extend(*arguments)
    after = [sys.getrefcount(one) for one in (tokens, packed, tokens[5], None)]
    assert all(abs(one - other) < 100 for one, other in zip(before, after, strict=True))
