"""A chain of six blocks, as an engine stores it and as the ledger announces it."""

from typing import Any

from kvatlas.blocks.hashing import extend_chain
from kvatlas.events import Removed, Stored
from kvatlas.identity import Scope
from kvatlas_publishers.engine_events import EngineBatch, EngineEvent, EngineStored
from kvatlas_publishers.ledger.ledger import Ledger, LedgerSettings

SCOPE_ID = Scope("m", "t").scope_id


TOKENS = list(range(100, 112))  # six blocks of two


CHAIN = extend_chain(TOKENS, 2)


def ledger(**settings: Any) -> Ledger:
    return Ledger(LedgerSettings("m", "t", **settings))


def store(names: list[Any], parent: Any = None, first: int = 0, **fields: Any) -> EngineStored:
    """An event that stores blocks of the chain, from block `first` on."""
    tokens = fields.pop("token_ids", TOKENS[2 * first : 2 * (first + len(names))])
    return EngineStored(names, parent, tokens, fields.pop("block_size", 2), **fields)


def fold(one: Ledger, *events: EngineEvent) -> Any:
    return one.fold(EngineBatch(events))


def hashes(first: int, last: int) -> bytes:
    return CHAIN[8 * first : 8 * last]


def reverse(packed: bytes) -> bytes:
    return b"".join(packed[at : at + 8] for at in range(len(packed) - 8, -1, -8))


def hashes_of(event: Stored | Removed) -> list[bytes]:
    return [event.hashes[at : at + 8] for at in range(0, len(event.hashes), 8)]


def held(one: Ledger) -> set[tuple[str, Any]]:
    return {(tier.label, name) for _, tier, name, _ in one.announced()}
