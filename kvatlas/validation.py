"""Numbers from outside: how large they may be, and what pydantic expected of a value, in one phrase for a user."""

from typing import Annotated, Any

from pydantic import Field
from pydantic_core import ErrorDetails

MAX_NUMBER = (1 << 53) - 1
"""Every whole number up to it is carried exactly by JSON, Lua and msgpack."""
MAX_OUTPUT_TOKENS = (1 << 31) - 1
"""What a request may be expected to generate; times any price of a token it is still such a number."""

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
    "extra_forbidden": "no such field",
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
    """`expected ...`, of one of a ValidationError's errors."""
    kind = error["type"]
    context: dict[str, Any] = error.get("ctx", {})
    if kind in _OF_TYPE:
        return f"expected {_OF_TYPE[kind]}"
    if kind in _LIMITS:
        text, limit = _LIMITS[kind]
        return f"expected {text.format(_plain(context[limit]))}"
    if kind in ("string_too_short", "too_short") and context["min_length"] == 1:
        return "expected a list that is not empty" if kind == "too_short" else "expected text that is not empty"
    said = error["msg"].removeprefix("Value error, ").removeprefix("Input should be ").removeprefix("expected ")
    return f"expected {said[0].lower()}{said[1:]}"


def describe_mistake(where: str, error: ErrorDetails) -> str:
    """One of a ValidationError's errors in one line; `where` names the field."""
    if error["type"] == "missing":
        return f"{where} is missing"
    return f"{where} is {error['input']!r:.80}; {describe_expected(error)}"


def _plain(number: float) -> str:
    """Without a fraction that is none: pydantic tells a float's limits as floats."""
    return str(int(number)) if number == int(number) else str(number)
