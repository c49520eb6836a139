"""Values created for each request are compared, hashed and replaced like the standard library's frozen dataclasses."""

import dataclasses
from dataclasses import field

import pytest

from kvatlas.dataclass import dataclass, replace


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 0
    note: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True, eq=False)
class Thing:
    x: int


def test_equal_values_are_one_key() -> None:
    assert {Point(1): "a"}[Point(1, note="of no account")] == "a"
    assert Point(1, 2) != Point(1, 3) and replace(Point(1, 2), y=3) == Point(1, 3)


def test_a_value_is_replaced_as_by_the_standard_library() -> None:
    made = replace(Point(1, 2, "note"), y=3)
    assert (made, made.note) == (dataclasses.replace(Point(1, 2), y=3), "note")
    with pytest.raises(TypeError, match="z"):
        replace(made, z=1)  # type: ignore[call-arg]


def test_things_that_are_not_compared_are_keys_by_themselves() -> None:
    first, second = Thing(1), Thing(1)
    assert first != second and len({first, second}) == 2
