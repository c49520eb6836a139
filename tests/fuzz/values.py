"""Extreme and malformed values, drawn from a seeded random generator."""

import math
from collections.abc import Callable
from random import Random
from typing import Any

import msgpack

MAX_BYTES = 900_000
"""The most that NATS accepts in one message."""
NUMBERS = [
    *(sign * (1 << bits) + by for bits in (0, 7, 8, 16, 20, 31, 32, 53, 63) for by in (-1, 0, 1) for sign in (-1, 1)),
    (1 << 64) - 1,
    0.0,
    -0.0,
    16.0,
    0.5,
    1e300,
    -1e300,
    math.inf,
    -math.inf,
    math.nan,
    True,
]
TEXTS = [
    "",
    "w",
    "a" * 600,
    "a" * 20_000,
    "\x00",
    "\n",
    "é€𝄞",
    "../..",
    "*",
    ">",
    "a.b",
    "16",
    "+Inf",
    "${x}",
    "\ud7ff",
]


def any_value(rng: Random, depth: int = 3) -> Any:
    """A number, text, bytes, list or map, nested up to `depth`."""
    kinds = 5 if depth else 3
    match rng.randrange(kinds):
        case 0:
            return rng.choice(NUMBERS)
        case 1:
            return rng.choice(TEXTS)
        case 2:
            return rng.choice([None, rng.randbytes(rng.choice([0, 1, 7, 8, 64, 5_000]))])
        case 3:
            return [any_value(rng, depth - 1) for _ in range(rng.choice([0, 1, 3] if depth > 1 else [0, 1, 40]))]
        case _:
            return {rng.choice(TEXTS): any_value(rng, depth - 1) for _ in range(rng.choice([0, 1, 4]))}


def mutated(rng: Random, value: Any) -> Any:
    """The value with one place in it changed, added or removed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        name = rng.choice(list(value))
        if rng.random() < 0.15:
            return {other: kept for other, kept in value.items() if other != name}
        return {**value, name: mutated(rng, value[name])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.15:
            return rng.choice([value[:at], [*value, any_value(rng)], value * 2])
        return [*value[:at], mutated(rng, value[at]), *value[at + 1 :]]
    return any_value(rng)


def packed(rng: Random, value: Any) -> bytes:
    """The value as msgpack, mutated once or more; sometimes with damaged bytes, or something else altogether."""
    choice = rng.random()
    if choice < 0.05:
        return rng.choice(BOMBS)(rng)
    if choice < 0.1:
        return rng.randbytes(rng.choice([0, 1, 10, 1_000]))
    for _ in range(rng.choice([1, 1, 2, 5])):
        value = mutated(rng, value)
    if choice > 0.95 and isinstance(value, list):  # the same events again and again
        value = [one * 100 if isinstance(one, list) and len(one) < 10 else one for one in value]
    payload = pack(value)[:MAX_BYTES]  # cut, it is damaged too
    if choice < 0.2:
        damaged = bytearray(payload or b"\x00")
        for _ in range(rng.choice([1, 3])):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        payload = bytes(damaged)
    return payload


def pack(value: Any) -> bytes:
    """The value as msgpack; integers beyond 64 bits become floats."""
    payload: bytes = msgpack.packb(_packable(value), unicode_errors="surrogatepass")
    return payload


def _packable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _packable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_packable(one) for one in value]
    return value if not isinstance(value, int) or -(1 << 63) <= value < 1 << 64 else float(value)


def _nested(rng: Random) -> bytes:
    return rng.choice([b"\x91", b"\x81\x01", b"\xdd\x7f\xff\xff\xff"]) * rng.choice([100, 5_000]) + b"\xc0"


def _many(rng: Random) -> bytes:
    """Many values in few bytes."""
    count = 400_000
    return b"\xdd" + count.to_bytes(4, "big") + rng.choice([b"\x90", b"\x80", b"\xe0"]) * count


def _extension(rng: Random) -> bytes:
    payload: bytes = msgpack.packb([msgpack.ExtType(rng.randrange(128), b"x"), msgpack.Timestamp(1, 2)])
    return payload


BOMBS: list[Callable[[Random], bytes]] = [_nested, _many, _extension]
