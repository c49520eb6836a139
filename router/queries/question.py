"""Another router's query, read from JSON: the prompt, the model, and the form of the answer.

Two forms share the paths `/query` and `/query_by_hash`. Mooncake's conductor calls the model `model`; Dynamo's indexer
calls it `model_name`. Sources: kvcache-ai/Mooncake docs/source/api-reference/http/conductor-indexer.md (August 2026);
ai-dynamo/dynamo lib/kv-router/src/services/indexer/server.rs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from kvatlas.blocks.external_chain import MAX_HASH, MIN_HASH
from kvatlas.blocks.hashing import chain_of_local_hashes, pack_hashes
from kvatlas.errors import InvalidValue

MAX_TOKENS = 1 << 20
MAX_HASHES = MAX_TOKENS // 16
"""Maximum number of hashes: that many tokens, in blocks of 16."""
MAX_BLOCK_SIZE = 1 << 20
ANY_TENANT = "default"
"""The name that means the caller's own tenant, since a query must name one."""
ONLY_GROUP = "default"
"""Dynamo's name for the routing group of all workers."""


class Form(Enum):
    """A query's form; the value is the name of its model field."""

    MOONCAKE = "model"
    DYNAMO = "model_name"


@dataclass(frozen=True, slots=True)
class Question:
    """`hashes`: packed sequence hashes, instead of `tokens`. `tenant`: as named in the query. `group`: routing group."""

    form: Form
    model: str
    adapter: str | None
    tenant: str
    tokens: Sequence[int] | None
    hashes: bytes
    block_size: int | None
    instance: str | None
    salt: str | None
    group: str = ONLY_GROUP


def read_question(body: Mapping[str, Any], *, by_hash: bool) -> Question:
    """Read a query. Raises InvalidValue, whose message names the first wrong field. This is slow for large queries, so call
    it in a thread."""
    named = [form for form in Form if form.value in body]
    if len(named) != 1:
        given = "both" if named else "neither"
        raise InvalidValue(f"{given} of model and model_name given; expected one of them")
    form = named[0]
    if body.get("lora_id") is not None:
        raise InvalidValue("lora_id is not supported; send lora_name")
    block_size = body.get("block_size")
    if block_size is not None and not _is_count(block_size, MAX_BLOCK_SIZE):
        raise InvalidValue(f"block_size is {block_size!r:.80}; expected a whole number above 0")
    salt = _text(body, "cache_salt")
    tokens: Sequence[int] | None = None
    hashes = b""
    if by_hash:
        if salt is not None:
            raise InvalidValue("cache_salt is given; send hashes that include it instead")
        hashes = _hashes(body, form)
    else:
        tokens = _list(body, "token_ids", MAX_TOKENS)
    return Question(
        form,
        _text(body, form.value) or "",
        _text(body, "lora_name"),
        _text(body, "tenant_id") or ANY_TENANT,
        tokens,
        hashes,
        block_size,
        _text(body, "instance_id"),
        salt,
        _text(body, "routing_group") or ONLY_GROUP,
    )


def check_length(name: str, length: int, most: int) -> None:
    """Check a list's length. Raises InvalidValue if it is longer than `most`."""
    if length > most:
        raise InvalidValue(f"{name} has {length} entries; expected at most {most}")


def _hashes(body: Mapping[str, Any], form: Form) -> bytes:
    """The query's sequence hashes. Dynamo sends hashes of each block alone; Mooncake sends hashes of all tokens up to the
    end of each block."""
    if form is Form.DYNAMO:
        return chain_of_local_hashes(
            [_hash("block_hashes", value) for value in _list(body, "block_hashes", MAX_HASHES)]
        )
    name = "block_hash" if "block_hash" in body and "seq_hashes" not in body else "seq_hashes"
    return pack_hashes([_hash(name, value) for value in _list(body, name, MAX_HASHES)])


def _hash(name: str, value: object) -> int:
    """A 64-bit number, signed or not. Text is accepted too, since many JSON parsers keep only 53 bits."""
    if isinstance(value, str) and len(value) <= 20:
        try:
            value = int(value, 16 if value.lower().startswith("0x") else 10)
        except ValueError:
            value = None
    if not isinstance(value, int) or isinstance(value, bool) or not MIN_HASH <= value <= MAX_HASH:
        raise InvalidValue(f"{name} contains {value!r:.80}; expected 64-bit integers")
    return value & MAX_HASH


def _list(body: Mapping[str, Any], name: str, most: int) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list):
        given = "missing" if value is None else f"of type {type(value).__name__}"
        raise InvalidValue(f"{name} is {given}; expected a list")
    check_length(name, len(value), most)
    return value


def _text(body: Mapping[str, Any], name: str) -> str | None:
    value = body.get(name)
    if isinstance(value, int) and not isinstance(value, bool) and name == "instance_id":
        return str(value)
    if value is not None and not isinstance(value, str):
        raise InvalidValue(f"{name} is {value!r:.80}; expected text")
    return value or None


def _is_count(value: object, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= most
