"""Turns writers' notices into events of the store's own ledger (pure).

Blocks are named by scope and sequence hash, because the writers of one store may be different engines or have different hash
seeds. Blocks whose model, tenant or size differs from the store's are refused.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvatlas.blocks.hashing import HASH_BYTES
from kvatlas.blocks.tiers import Tier
from kvatlas.errors import WireError
from kvatlas.identity import Scope
from kvatlas_publishers.engine_events import (
    EngineBatch,
    EngineCleared,
    EngineEvent,
    EngineHash,
    EngineRemoved,
    EngineStored,
)
from kvatlas_publishers.engines.mooncake import ObjectName
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
    """Convert a notice to events, except for removed adapters (`adapters_gone`). `uses_keys`: the ledger already knows that
    keys are used. Raises WireError for a notice that does not fit the store."""
    if notice.block_size != settings.block_size:
        raise WireError(f"blocks of {notice.block_size} tokens; the store's have {settings.block_size}")
    events: list[EngineEvent] = []
    if notice.uses_keys and not uses_keys:
        events.append(EngineStored([], None, (), notice.block_size, TIER, extra_keys=()))
    for change in notice.changes:
        events += _events(change, notice.block_size, settings)
    return events


def objects_of(batch: EngineBatch, settings: LedgerSettings) -> EngineBatch:
    """Convert a batch from Mooncake's master for the store's own ledger. Objects of another model or tenant are left
    out."""
    events: list[EngineEvent] = []
    skipped = list(batch.skipped)
    for event in batch.events:
        if isinstance(event, EngineStored | EngineRemoved):
            names = list(_objects(event.hashes, settings))
            if len(names) < len(event.hashes):
                skipped.append(f"{len(event.hashes) - len(names)} objects of another model or tenant than the store's")
            event = replace(event, hashes=names)
        events.append(event)
    return replace(batch, events=events, skipped=skipped)


def _objects(packed: Iterable[EngineHash], settings: LedgerSettings) -> Iterator[bytes]:
    for one in packed:
        name = ObjectName.unpack(one) if isinstance(one, bytes) else None
        if name is None or name.model not in ("", settings.model_id):
            continue
        tenant_id = name.tenant if name.tenant and settings.salt_is_tenant else settings.tenant_id
        if name.tenant in ("", tenant_id):
            scope = Scope(settings.model_id, settings.tokenizer_id, name.adapter or None, tenant_id)
            yield scope.scope_id + name.hash


def adapters_gone(notice: StoreNotice) -> list[str]:
    """Adapters whose blocks are all gone."""
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
    """The scope's tenant as a salt, which is the form that the ledger expects. Raises WireError if the scope does not fit the
    store."""
    if (scope.model_id, scope.tokenizer_id) != (settings.model_id, settings.tokenizer_id):
        raise WireError(f"blocks of {scope.log_name}; the store is of {settings.model_id}/{settings.tokenizer_id}")
    if scope.tenant_id == settings.tenant_id:
        return None
    if not settings.salt_is_tenant:
        raise WireError(f"blocks of {scope.log_name} of another tenant than the store's (see --salt-is-tenant)")
    return scope.tenant_id
