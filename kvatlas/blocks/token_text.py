"""Token ids as users write them."""

import json

from kvatlas.blocks.hashing import MAX_TOKEN_ID
from kvatlas.errors import InvalidValue

MAX_DIGITS = 20


def parse_tokens(text: str) -> list[int]:
    """Parse token ids: a JSON array, or integers separated by white space or commas.

    Raises InvalidValue for anything else, for an empty list, and for a token outside 0..2^32-1.
    """
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:  # RecursionError: nested too deeply
            raise InvalidValue(f"not a JSON array: {error}") from error
        parts = list(enumerate(found))
    else:
        parts = list(enumerate(text.replace(",", " ").split()))
    tokens = [_check_token(index, part) for index, part in parts]
    if not tokens:
        raise InvalidValue("no token ids; expected integers separated by white space or commas, or a JSON array")
    return tokens


def _check_token(index: int, part: object) -> int:
    is_number = isinstance(part, str) and part.isascii() and part.isdigit() and len(part) <= MAX_DIGITS
    token = int(part) if isinstance(part, str) and is_number else part
    if type(token) is not int or not 0 <= token <= MAX_TOKEN_ID:
        raise InvalidValue(f"token {index} is {part!r:.80}; expected an integer from 0 to {MAX_TOKEN_ID}")
    return token
