"""Reads a JSON body as engines do, and writes it in the one form that all of them accept.

vLLM reads bodies with `json.loads`, which also accepts UTF-8 with a byte order mark, UTF-16 and UTF-32; SGLang reads them with
orjson, which accepts only plain UTF-8. In both, the last of two equal keys wins. Unpaired surrogates are refused: vLLM accepts
them in some fields and fails on them in others.
"""

import json
from typing import Any

import orjson

from kvatlas.errors import InvalidValue
from kvatlas.runtime.json_text import decode_strictly
from kvatlas_router.tokens.text_request import check_size

MAX_DEPTH = 256
"""Code that reads the body later may recurse once per level; engines fail at about 1,000 levels."""
_TOO_DEEP = f"the body is nested too deeply; expected at most {MAX_DEPTH} levels"


class UnreadableBody(InvalidValue):
    """The router can't read a body, so engines must not get it either."""


def read_object(body: bytes) -> tuple[dict[str, Any], bytes]:
    """The object, and the body in plain UTF-8. Raises UnreadableBody, or InvalidValue for a large body."""
    check_size(body)
    try:
        plain = body[:1] == b"{" and body[1:2] > b"\0"  # as almost always
        encoding = "utf-8" if plain else json.detect_encoding(body)
        if encoding == "utf-8" and (decoded := decode_strictly(body)) is not None:
            return _checked(decoded), body
        text = body.decode(encoding)
        decoded = json.loads(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(decoded, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise UnreadableBody(
            "the body has half of a surrogate pair (\\ud800 to \\udfff); expected whole characters"
        ) from None
    except UnicodeDecodeError as error:
        line = f"the body is not text in {error.encoding.upper()}: {error.reason} at byte {error.start}"
        raise UnreadableBody(line) from None
    except RecursionError:
        raise UnreadableBody(_TOO_DEEP) from None
    except ValueError as error:
        raise UnreadableBody(f"the body is not JSON: {error}") from None
    return _checked(decoded), body if encoding == "utf-8" else text.encode()


def _checked(decoded: Any) -> dict[str, Any]:
    if not isinstance(decoded, dict):
        raise UnreadableBody(f"the body is a JSON {type(decoded).__name__}; expected an object")
    if _is_deep(decoded):
        raise UnreadableBody(_TOO_DEEP)
    return decoded


def _is_deep(value: Any) -> bool:
    try:
        orjson.dumps(value)  # refuses more than 254 levels, in a fraction of the time of counting them
    except TypeError:
        pass
    else:
        return False
    level = [value]
    for _ in range(MAX_DEPTH):
        parts = (one.values() if isinstance(one, dict) else one for one in level)
        level = [child for part in parts for child in part if isinstance(child, (dict, list))]
        if not level:
            return False
    return True
