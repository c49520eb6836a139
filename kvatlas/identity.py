"""Identity: the scope of a KV block, the ids of workers, and the pool that serves a model."""

import re
from functools import lru_cache
from hashlib import blake2b

import msgpack

from kvatlas.dataclass import dataclass
from kvatlas.errors import InvalidValue

DEFAULT_TENANT = "default"
OWN_CHAIN = "own"
EXTERNAL_PREFIX = "external:"
DEFAULT_HASH_CHAIN = "default"
DEFAULT_EXTERNAL_CHAIN = f"{EXTERNAL_PREFIX}{DEFAULT_HASH_CHAIN}"
MAX_NAME_BYTES = 512
SCOPE_ID_BYTES = 8

_WORKER_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class Scope:
    """An identity scope: KV blocks are interchangeable only within one scope.

    All fields must match exactly; an absent adapter only matches an absent adapter. `chain` says where the keys come from: our
    own hash chain (`kvatlas.blocks.hashing`), or block hashes that an engine has computed itself (`external:<name>`,
    `kvatlas.blocks.external_chain`). Raises InvalidValue for a field that is empty or too long.
    """

    model_id: str
    tokenizer_id: str
    adapter_id: str | None = None
    tenant_id: str = DEFAULT_TENANT
    chain: str = OWN_CHAIN

    def __post_init__(self) -> None:
        for name in ("model_id", "tokenizer_id", "adapter_id", "tenant_id"):
            value = getattr(self, name)
            if value is None and name == "adapter_id":
                continue
            if not isinstance(value, str) or not 0 < len(value.encode()) <= MAX_NAME_BYTES:
                raise InvalidValue(
                    f"scope field {name} is {_kind(value)}; expected text of 1 to {MAX_NAME_BYTES} bytes"
                )
        if self.chain != OWN_CHAIN:
            check_chain(self.chain)

    @property
    def canonical(self) -> bytes:
        """The scope's canonical msgpack: [model_id, tokenizer_id, adapter_id or nil, tenant_id], plus the chain if it is
        not our own."""
        return canonical_scope(self)

    @property
    def scope_id(self) -> bytes:
        """The 8-byte BLAKE2b hash of the canonical form."""
        return _scope_id(self)

    @property
    def pool_id(self) -> str:
        """The pool of workers that serve this scope's model."""
        return pool_id(self.model_id, self.tokenizer_id)

    @property
    def log_name(self) -> str:
        """The scope without its tenant, which must not appear in logs."""
        return f"{self.model_id}/{self.tokenizer_id}/{self.adapter_id or '-'}"

    def __str__(self) -> str:
        names = f"{self.log_name}/{self.tenant_id}"
        return names if self.chain == OWN_CHAIN else f"{names}/{self.chain}"


def _kind(value: object) -> str:
    """Describe a wrong field without quoting it, because tenants must not appear in logs."""
    if isinstance(value, str):
        return f"text of {len(value.encode())} bytes"
    return "missing" if value is None else f"of type {type(value).__name__}"


def check_chain(chain: str) -> str:
    """Return the name of a hash chain. Raises InvalidValue unless it is `own` or `external:<name>`."""
    if chain != OWN_CHAIN:
        is_text = isinstance(chain, str) and chain.startswith(EXTERNAL_PREFIX)
        if not is_text or not len(EXTERNAL_PREFIX) < len(chain.encode()) <= MAX_NAME_BYTES:
            raise InvalidValue(
                f"chain is {chain!r:.80}; expected {OWN_CHAIN}, or {EXTERNAL_PREFIX}NAME of up to {MAX_NAME_BYTES} bytes"
            )
    return chain


@lru_cache(maxsize=65_536)
def canonical_scope(scope: Scope) -> bytes:
    fields = [scope.model_id, scope.tokenizer_id, scope.adapter_id, scope.tenant_id]
    if scope.chain != OWN_CHAIN:
        fields.append(scope.chain)
    packed: bytes = msgpack.packb(fields)
    return packed


@lru_cache(maxsize=65_536)
def _scope_id(scope: Scope) -> bytes:
    return blake2b(canonical_scope(scope), digest_size=SCOPE_ID_BYTES).digest()


def scope_from_canonical(canonical: bytes) -> Scope:
    """The inverse of `Scope.canonical`. Raises InvalidValue for other bytes."""
    try:
        model_id, tokenizer_id, adapter_id, tenant_id, *chain = msgpack.unpackb(canonical)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise InvalidValue(f"not a canonical scope: {canonical[:64]!r}") from error
    if len(chain) > 1:
        raise InvalidValue(f"not a canonical scope: {canonical[:64]!r}")
    return Scope(model_id, tokenizer_id, adapter_id, tenant_id, *chain)


@lru_cache(maxsize=65_536)
def pool_id(model_id: str, tokenizer_id: str) -> str:
    """16 hex digits: the 8-byte BLAKE2b hash of the canonical msgpack [model_id, tokenizer_id]."""
    return blake2b(msgpack.packb([model_id, tokenizer_id]), digest_size=8).hexdigest()


def check_worker_id(worker_id: str) -> str:
    """Return the worker id. Raises InvalidValue unless it has the form of a subject token: 1 to 64 characters from
    `[A-Za-z0-9_-]`."""
    if not isinstance(worker_id, str) or not _is_worker_id(worker_id):
        raise InvalidValue(f"worker id {worker_id!r:.80}; expected 1 to 64 characters from A-Z a-z 0-9 _ -")
    return worker_id


@lru_cache(maxsize=65_536)
def _is_worker_id(text: str) -> bool:
    return _WORKER_ID.fullmatch(text) is not None


def rank_worker_id(instance_id: str, dp_rank: int) -> str:
    """The worker id of data-parallel rank `dp_rank` of an instance: `<instance>-dp<rank>`."""
    return check_worker_id(f"{instance_id}-dp{dp_rank}")


def instance_of(worker_id: str) -> str:
    """The instance that a worker is a data-parallel rank of; the worker's own id if it is not a rank."""
    instance, dp, rank = worker_id.rpartition("-dp")
    return instance if dp and rank.isdecimal() else worker_id


def shard_of(partition: int, shards: int) -> int:
    """The shard of the index that holds a partition's workers."""
    return partition % shards
