"""From writers' notices to events of the store's own ledger (pure).

A block is named by its scope and its sequence hash, whoever wrote it: writers of one store may have other hash seeds, or be
other engines. What is of another model, or of a tenant that is not the store's, is refused, and so are blocks of another size.
"""

from collections.abc import Iterator

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import WireError
from kvatlas.identity import Scope
from kvatlas_publishers.engine_events import EngineCleared, EngineEvent, EngineRemoved, EngineStored
from kvatlas_publishers.ledger.connectors.shared_store_notice import (
    AdapterGone,
    GoneFromStore,
    StoreChange,
    StoreCleared,
    StoredInStore,
    StoreNotice,
)
from kvatlas_publishers.ledger.settings import LedgerSettings

TIER = Tier.OBJECT_STORE


def events_of(notice: StoreNotice, settings: LedgerSettings, *, uses_keys: bool) -> list[EngineEvent]:
    """A notice as events, without the adapters that are gone (`adapters_gone`). `uses_keys`: the ledger knows that already.
    Raises WireError for a notice of no use."""
    if notice.block_size != settings.block_size:
        raise WireError(f"blocks of {notice.block_size} tokens; the store's have {settings.block_size}")
    events: list[EngineEvent] = []
    if notice.uses_keys and not uses_keys:
        events.append(EngineStored([], None, (), notice.block_size, TIER, extra_keys=()))
    for change in notice.changes:
        events += _events(change, notice.block_size, settings)
    return events


def adapters_gone(notice: StoreNotice) -> list[str]:
    """Adapters of which all blocks are gone."""
    return [change.adapter for change in notice.changes if isinstance(change, AdapterGone)]


def _events(change: StoreChange, block_size: int, settings: LedgerSettings) -> Iterator[EngineEvent]:
    match change:
        case StoredInStore(scope, hashes, parent):
            yield EngineStored(
                list(_names(scope, hashes)),
                None if parent is None else scope.scope_id + parent,
                (),
                block_size,
                TIER,
                adapter=scope.adapter_id,
                salt=_salt(scope, settings),
                removal_told=False,
                sequence_hashes=hashes,
            )
        case GoneFromStore(scope, hashes):
            yield EngineRemoved(list(_names(scope, hashes)), TIER)
        case StoreCleared():
            yield EngineCleared((TIER,))


def _names(scope: Scope, hashes: bytes) -> Iterator[bytes]:
    return (scope.scope_id + hashes[at : at + HASH_BYTES] for at in range(0, len(hashes), HASH_BYTES))


def _salt(scope: Scope, settings: LedgerSettings) -> str | None:
    """A tenant is told to the ledger as a salt that is one. Raises WireError for a scope that is not the store's."""
    if (scope.model_id, scope.tokenizer_id) != (settings.model_id, settings.tokenizer_id):
        raise WireError(f"blocks of {scope.log_name}; the store is of {settings.model_id}/{settings.tokenizer_id}")
    if scope.tenant_id == settings.tenant_id:
        return None
    if not settings.salt_is_tenant:
        raise WireError(f"blocks of {scope.log_name} of another tenant than the store's (see --salt-is-tenant)")
    return scope.tenant_id
