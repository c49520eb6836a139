"""Bounds for values that come from outside, and pydantic's errors as one line for a user.

Calculations rely on these bounds: the product of any two values stays below MAX_NUMBER, and values that the store keeps in 32
bits fit there.
"""

from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

MAX_NUMBER = (1 << 53) - 1
"""JSON, Lua and msgpack can all carry every whole number up to this one exactly."""
MAX_OUTPUT_TOKENS = (1 << 31) - 1
"""Largest expected output of a request: multiplied by any token price, it stays below MAX_NUMBER."""
MAX_BLOCK_TOKENS = 1 << 20
"""Largest number of tokens in a block."""
MAX_BLOCK_BYTES = (1 << 32) - 1
"""Largest number of KV cache bytes in a block; the store keeps it in 32 bits."""
MAX_KV_BLOCKS = (1 << 32) - 1
"""Largest number of blocks in an engine's cache: with the largest blocks, its tokens stay below MAX_NUMBER."""
MAX_GRANULARITY = 1 << 16
MAX_LOOKAHEAD = 64
"""Largest number of tokens after a block that its hash covers."""
MAX_ITEMS = 64
"""Maximum number of labels, or of groups, per worker."""
MAX_TENANTS = 1_024
"""Maximum number of tenant names in one identity."""

Positive = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
Count = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Incarnation = Annotated[int, Field(ge=0, lt=1 << 64)]
AckedSeq = Annotated[int, Field(ge=-1, le=MAX_NUMBER)]
BlockTokens = Annotated[int, Field(ge=1, le=MAX_BLOCK_TOKENS)]
BlockBytes = Annotated[int, Field(ge=0, le=MAX_BLOCK_BYTES)]
KvBlocks = Annotated[int, Field(ge=0, le=MAX_KV_BLOCKS)]
Lookahead = Annotated[int, Field(ge=0, le=MAX_LOOKAHEAD)]
Granularity = Annotated[int, Field(ge=1, le=MAX_GRANULARITY)]
Rank = Annotated[int, Field(ge=0, le=65_535)]
BootstrapPort = Annotated[int, Field(ge=1, le=65_535)]
Name = Annotated[str, Field(min_length=1, max_length=512)]
Text = Annotated[str, Field(max_length=512)]
Url = Annotated[str, Field(max_length=2_048)]
OutputTokens = Annotated[int, Field(ge=0, le=MAX_OUTPUT_TOKENS)]
DEFAULT_DECODE_TOKENS = 128
"""The length that is assumed for an answer if none is given."""

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
    """What the input should have been, according to one error of a ValidationError: `expected ...`."""
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


def describe_invalid(error: ValidationError, whole: str) -> str:
    """The first error, as one line with the path of the field; `whole` names the input if it is wrong as a whole."""
    first = error.errors()[0]
    return describe_mistake(".".join(map(str, first["loc"])) or whole, first)


def describe_mistake(where: str, error: ErrorDetails) -> str:
    """One error in a ValidationError, as one line; `where` names the field."""
    context: dict[str, Any] = error.get("ctx", {})
    match error["type"]:
        case "missing":
            return f"{where} is missing"
        case "union_tag_not_found":
            return f"{where}: {_unquoted(context['discriminator'])} is missing"
        case "union_tag_invalid":
            tag, tags = f"{context['tag']!r:.80}", _unquoted(context["expected_tags"])
            return f"{where}: {_unquoted(context['discriminator'])} is {tag}; expected one of {tags}"
    return f"{where} is {error['input']!r:.80}; {describe_expected(error)}"


def _unquoted(names: str) -> str:
    """The names without the quotes that pydantic puts around each of them."""
    return names.replace("'", "")


def _plain(number: float) -> str:
    """A limit without a trailing `.0`, because pydantic reports the limits of floats as floats."""
    return str(int(number)) if number == int(number) else str(number)


@lru_cache(maxsize=16_384)
def matches(value: str, patterns: tuple[str, ...]) -> bool:
    """True if the value is one of these names, in which `*` stands for any text."""
    return any(fnmatchcase(value, pattern) for pattern in patterns)
