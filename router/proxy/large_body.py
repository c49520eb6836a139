"""Finds the model that a large JSON body names, without decoding the rest or blocking the event loop.

Decoding 57 MiB of JSON can take seconds and a gigabyte of memory, and lets nothing else run, even if it is done in a
thread. So such a request is routed only by its length.
"""

import asyncio
import json
import re

from kvatlas_router.engine_objects.object_use import is_object_field
from kvatlas_router.proxy.json_body import UnreadableBody
from kvatlas_router.tenancy.withheld_fields import is_refused
from router_client.pricing.transfer_protocol import WITHHELD, NotForClients

SLICE_BYTES = 256 * 1024
SLICE_STEPS = 1_000
MAX_STEPS = 1 << 20
"""Limit on the number of quotes, brackets and braces in a body: about 0.5 s of work, in slices of less than a
millisecond."""
MAX_NAME_BYTES = 4_096
MAX_DEEP_NAME_BYTES = 6 * max(map(len, WITHHELD))
"""Length of the longest name that matters in a nested object, if every letter is escaped."""

_DEEP = re.compile(rb'["{}\[\]]')
_COLON = re.compile(rb"\s*:")
_SHALLOW = re.compile(rb'["{}\[\]:,]')


async def find_model(body: bytes, *, of_tenant: bool = False) -> str | None:
    """The text under `model` in a JSON object; None if there is none. The engine judges the rest of the body.

    Raises UnreadableBody if the body is not exactly one object, or has too many values to scan. Raises NotForClients for a
    field of WITHHELD at any depth and, with `of_tenant`, for one that tenants' clients may not send or that names an
    engine's object.
    """
    if json.detect_encoding(body[:4]) != "utf-8":
        raise UnreadableBody(f"the body has {len(body)} bytes; so large a body must be UTF-8 without a byte order mark")
    if body[:64].lstrip()[:1] != b"{":
        raise UnreadableBody("the body is not a JSON object")
    at = depth = steps = 0
    key, names_value = b"", False
    model: str | None = None
    while at < len(body):
        steps += 1
        if steps % SLICE_STEPS == 0:
            await asyncio.sleep(0)
        if steps > MAX_STEPS:
            raise UnreadableBody(
                f"the body has {len(body)} bytes and more than {MAX_STEPS} JSON values, too many for a large body"
            )
        found = (_SHALLOW if depth == 1 else _DEEP).search(body, at, at + SLICE_BYTES)
        if found is None:
            at += SLICE_BYTES
            await asyncio.sleep(0)
            continue
        sign, at = found[0], found.end()
        if sign == b'"':
            end = await _end_of_text(body, at)
            text = body[at - 1 : end] if end - at <= (MAX_NAME_BYTES if depth == 1 else MAX_DEEP_NAME_BYTES) else b""
            at = end
            if depth > 1 and text and _COLON.match(body, at):
                within = (_read_text(key) or "") if of_tenant else ""
                _check_name(_read_text(text), body, of_tenant=of_tenant, within=within)
            elif depth == 1 and not names_value:
                key = text
            elif depth == 1 and _read_text(key) == "model":
                model = _read_text(text)
        elif sign in b"{[":
            depth += 1
        elif sign in b"}]":
            depth -= 1
            if depth == 0:
                break
        else:
            names_value = sign == b":"
            name = _read_text(key) if names_value else None
            if name == "model":
                model = None  # unless a text follows
            else:
                _check_name(name, body, of_tenant=of_tenant)
    if depth or body[at:].strip():
        raise UnreadableBody("the body is not a JSON object: it does not end with one")
    return model


def _check_name(name: str | None, body: bytes, *, of_tenant: bool, within: str | None = None) -> None:
    if name in WITHHELD or (of_tenant and name and (is_refused(name, within) or is_object_field(name, within))):
        raise NotForClients(f"{name} is in a body of {len(body)} bytes; remove it from large bodies")


async def _end_of_text(body: bytes, start: int) -> int:
    """The position after a text's closing quote. Raises UnreadableBody if there is none."""
    at = start
    for step in range(1, MAX_STEPS + 1):
        quote = body.find(b'"', at, at + SLICE_BYTES)
        if quote < 0 and at + SLICE_BYTES >= len(body):
            raise UnreadableBody("the body is not a JSON object: it ends inside a string")
        if quote < 0 or step % SLICE_STEPS == 0:
            await asyncio.sleep(0)
        if quote >= 0 and _backslashes_before(body, start, quote) % 2 == 0:
            return quote + 1
        at = quote + 1 if quote >= 0 else at + SLICE_BYTES
    raise UnreadableBody(f"the body has a text with more than {MAX_STEPS} quotes, too many for a large body")


def _backslashes_before(body: bytes, start: int, at: int) -> int:
    looked = 16
    while True:
        tail = body[max(start, at - looked) : at]
        count = len(tail) - len(tail.rstrip(b"\\"))
        if count < len(tail) or len(tail) < looked:
            return count
        looked *= 16


def _read_text(raw: bytes) -> str | None:
    try:
        text = json.loads(raw)
    except ValueError:
        return None
    return text if isinstance(text, str) and text else None
