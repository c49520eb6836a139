"""Decodes untrusted msgpack in bounded memory.

One byte of msgpack may become 64 bytes of objects, for example an empty array or a small negative number. Before a large
payload is decoded, such values are counted. Any other integer takes up at most 14 times its own bytes.
"""

import re
from typing import Any

import msgpack

from kvatlas.errors import InvalidValue

UNCOUNTED_BYTES = 512 * 1024
"""Payloads up to this size are decoded without counting: they become at most 32 MiB."""
MAX_OTHER_VALUES = 1 << 18
"""Maximum number, in a large payload, of texts, arrays, maps, non-integer numbers and small negative integers."""

_INTEGERS = re.compile(rb"(?s:[\x00-\x7f]|\xcc.|[\xcd\xd1].{2}|[\xce\xd2].{4}|[\xcf\xd3].{8})++")
_FIXED_BYTES = {0xD0: 1, 0xCA: 4, 0xCB: 8, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
"""The number of bytes after the code, for a number or for the length of an array or map."""
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""The number of bytes that give the length, after the code of a text or byte string."""


def unpack(payload: bytes, *, max_bytes: int, strict_map_key: bool = True) -> Any:
    """The decoded value. Raises InvalidValue for more than `max_bytes`, for bytes that are not msgpack, and for kinds of values
    other than those of JSON and bytes."""
    if len(payload) > max_bytes:
        raise InvalidValue(f"{len(payload)} bytes; expected at most {max_bytes}")
    if len(payload) > UNCOUNTED_BYTES:
        _check_values(payload)
    try:
        return msgpack.unpackb(payload, strict_map_key=strict_map_key, ext_hook=_refuse_extension)
    except (ValueError, TypeError, MemoryError, RecursionError, msgpack.UnpackException) as error:
        why = " ".join(str(error).split())
        raise InvalidValue(
            f"{len(payload)} bytes that are not msgpack: {type(error).__name__} {why:.80}".rstrip()
        ) from error


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code}")


def _check_values(payload: bytes) -> None:
    """Check that there are not too many values that take up much more memory than their bytes do. Raises InvalidValue."""
    at = others = 0
    while at < len(payload):
        if integers := _INTEGERS.match(payload, at):
            at = integers.end()
            continue
        code = payload[at]
        at += 1
        if 0xA0 <= code <= 0xBF:
            at += code & 0x1F
        elif code in _LENGTH_BYTES:
            size = _LENGTH_BYTES[code]
            at += size + int.from_bytes(payload[at : at + size], "big")
        else:
            at += _FIXED_BYTES.get(code, 0)
        others += 1
        if others > MAX_OTHER_VALUES:
            raise InvalidValue(f"{len(payload)} bytes with more than {MAX_OTHER_VALUES} arrays, maps and texts")
