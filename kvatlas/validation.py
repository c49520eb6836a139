"""Bounds for numbers from outside, and pydantic's errors as one line for a user."""

from typing import Annotated, Any

from pydantic import Field
from pydantic_core import ErrorDetails

MAX_NUMBER = (1 << 53) - 1
"""JSON, Lua and msgpack carry every whole number up to it exactly."""
MAX_OUTPUT_TOKENS = (1 << 31) - 1
"""Largest expected output of a request; multiplied by any price of a token it stays below MAX_NUMBER."""

Positive = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
Count = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
OutputTokens = Annotated[int, Field(ge=0, le=MAX_OUTPUT_TOKENS)]

_OF_TYPE = {
    "int_parsing": "an integer",
    "int_parsing_size": "an integer",
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "string_unicode": "text in UTF-8",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
_LIMITS = {
    "greater_than_equal": ("at least {}", "ge"),
    "greater_than": ("more than {}", "gt"),
    "less_than_equal": ("at most {}", "le"),
    "less_than": ("less than {}", "lt"),
    "string_too_long": ("at most {} characters", "max_length"),
    "too_long": ("at most {} items", "max_length"),
}


def describe_expected(error: ErrorDetails) -> str:
    """What one error of a ValidationError expected, as a phrase `expected ...`."""
    kind = error["type"]
    context: dict[str, Any] = error.get("ctx", {})
    if kind in _OF_TYPE:
        return f"expected {_OF_TYPE[kind]}"
    if kind in _LIMITS:
        text, limit = _LIMITS[kind]
        return f"expected {text.format(_plain(context[limit]))}"
    if kind in ("string_too_short", "too_short") and context["min_length"] == 1:
        return "expected a non-empty list" if kind == "too_short" else "expected non-empty text"
    if kind == "extra_forbidden":
        return "there is no such field"
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ").removeprefix("expected ")
    return f"expected {message[0].lower()}{message[1:]}"


def describe_mistake(where: str, error: ErrorDetails) -> str:
    """One error of a ValidationError in one line; `where` names the field."""
    if error["type"] == "missing":
        return f"{where} is missing"
    return f"{where} is {error['input']!r:.80}; {describe_expected(error)}"


def _plain(number: float) -> str:
    """A limit without a zero fraction: pydantic reports the limits of floats as floats."""
    return str(int(number)) if number == int(number) else str(number)
