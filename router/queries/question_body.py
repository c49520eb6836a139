"""Reads the JSON of a query without delaying others: a long list of token ids is read in slices, with turns of the event loop
between them, and the number of other values is limited."""

import asyncio
import re
from collections.abc import Sequence
from contextlib import suppress
from secrets import token_hex
from typing import Any

import orjson

from kvatlas.errors import InvalidValue
from kvatlas_router.proxy.json_body import UnreadableBody, read_object
from kvatlas_router.queries.question import MAX_TOKENS, check_length

LARGE_BODY = 64 << 10
"""Larger bodies are read in this way."""
SLICE_BYTES = 64 << 10
SLICE_TOKENS = 1 << 14
MAX_VALUES = 1 << 17
"""Limit on the number of values besides token ids; this many are decoded in a few milliseconds."""

_TOKEN_IDS = re.compile(rb'"token_ids"\s*:\s*\[')


async def read_question_body(body: bytes) -> dict[str, Any]:
    """Read the JSON object. Raises UnreadableBody, or InvalidValue if there are too many values."""
    if len(body) <= LARGE_BODY:
        return read_object(body)[0]
    found = _TOKEN_IDS.search(body)
    end = -1 if found is None else body.find(b"]", found.end())
    if found is not None and end >= 0:
        with suppress(UnreadableBody):  # the list is within a text or another object, or has more than numbers
            return await _read_around(body, found.end(), end)
    return await _read_in_thread(body)


async def copy_in_slices(tokens: Sequence[int]) -> list[int]:
    """Copy the tokens into a list."""
    copied: list[int] = []
    for first in range(0, len(tokens), SLICE_TOKENS):
        copied += tokens[first : first + SLICE_TOKENS]
        await asyncio.sleep(0)
    return copied


async def _read_around(body: bytes, start: int, end: int) -> dict[str, Any]:
    """Read a body whose list of token ids extends from `start` to `end`. Raises UnreadableBody if that is not such a list."""
    marker = token_hex(8)
    read = await _read_in_thread(b'%b"%b"%b' % (body[: start - 1], marker.encode(), body[end + 1 :]))
    if read.get("token_ids") != marker:
        raise UnreadableBody("token_ids is not in the body itself")
    read["token_ids"] = await _read_list(body, start, end)
    return read


async def _read_list(body: bytes, start: int, end: int) -> list[Any]:
    values: list[Any] = []
    while True:
        cut = body.find(b",", start + SLICE_BYTES, end)
        stop = end if cut < 0 else cut
        try:
            some = orjson.loads(b"[%b]" % body[start:stop])
        except ValueError as error:
            raise UnreadableBody(f"token_ids is not a list of numbers: {error}") from None
        if values and not some:
            raise UnreadableBody("token_ids is not a list of numbers: nothing follows its last comma")
        values += some
        check_length("token_ids", len(values), MAX_TOKENS)
        if cut < 0:
            return values
        start = cut + 1
        await asyncio.sleep(0)


async def _read_in_thread(body: bytes) -> dict[str, Any]:
    if (count := body.count(b",")) > MAX_VALUES:
        raise InvalidValue(f"the body has {count} values besides token_ids; expected at most {MAX_VALUES}")
    return (await asyncio.to_thread(read_object, body))[0]
