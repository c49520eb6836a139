"""The open event forms as pydantic models. Any engine or tool may send them, as JSON or msgpack. `docs/events.md` describes
them, and `docs/events.schema.json` is their JSON Schema.

Unknown fields are ignored: an engine may send more than this version of the publisher knows.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from kvatlas.blocks.external_chain import MAX_HASH, MIN_HASH
from kvatlas.blocks.hashing import MAX_TOKEN_ID
from kvatlas.validation import BlockBytes, BlockTokens, Name, Rank

MAX_GROUP = 1_023
SCHEMA_URL = "https://json-schema.org/draft/2020-12/schema"

_Integer = Annotated[int, Field(strict=True, ge=MIN_HASH, le=MAX_HASH)]
BlockHash = _Integer | Annotated[str, Field(strict=True, min_length=1, max_length=512)]
"""A 64-bit integer, signed or not, or text. Text of 16 lower-case hex digits stands for the integer."""
TokenId = Annotated[int, Field(strict=True, ge=0, le=MAX_TOKEN_ID)]


class _Form(BaseModel):
    model_config = ConfigDict(defer_build=True, frozen=True, extra="ignore", protected_namespaces=())


class BlockStored(_Form):
    """Blocks of one chain were stored, first to last. Each is the child of the previous one; the first is the child of
    `parent_block_hash` (null or "root": a prompt's first block).

    With `token_ids` the blocks are keyed by their tokens, so that any router finds them. If an engine never sends token ids,
    its blocks are keyed by its own hashes, for requests that carry such hashes (an external chain). If it does, an event
    without them reports additional copies of known blocks. `session_id`: replaces "root" for hashes that are valid only within
    a session.
    """

    type: Literal["block_stored"]
    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None = None
    session_id: Name | None = None
    token_ids: list[TokenId] | None = None
    block_size: BlockTokens
    medium: str | None = None
    lora_name: Name | None = None
    group_idx: Annotated[int, Field(strict=True, ge=0, le=MAX_GROUP)] | None = None
    bytes_per_block: BlockBytes | None = None

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        expected = len(self.block_hashes) * self.block_size
        if self.token_ids and len(self.token_ids) != expected:
            raise ValueError(
                f"{expected} token_ids for {len(self.block_hashes)} blocks of {self.block_size}; there are "
                f"{len(self.token_ids)}"
            )
        return self


class BlockRemoved(_Form):
    """The blocks are gone from the tier `medium` or, if that is absent, from all tiers."""

    type: Literal["block_removed"]
    block_hashes: list[BlockHash]
    medium: str | None = None
    group_idx: Annotated[int, Field(strict=True, ge=0, le=MAX_GROUP)] | None = None


class AllBlocksCleared(_Form):
    """The worker no longer holds any block, in any tier."""

    type: Literal["all_blocks_cleared"]


class BatchFields(_Form):
    """The fields of a batch other than its events. `model_id` and `tokenizer_id`, if given, must be the publisher's.
    `adapter_id`: for events without `lora_name`. `load`: request_active_slots and so on, as in docs/events.md."""

    engine_id: Name
    ts_ms: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    model_id: Name | None = None
    tokenizer_id: Name | None = None
    adapter_id: Name | None = None
    tenant_id: Name | None = None
    bytes_per_block: BlockBytes | None = None
    load: dict[str, Any] | None = None


class EventBatch(BatchFields):
    """A batch of an engine's events, in the order in which they happened."""

    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class StoredBlock(_Form):
    """`block_hash`: the engine's name for the block. `tokens_hash`: the local hash of its tokens, XXH3-64 with seed
    1337."""

    block_hash: _Integer
    tokens_hash: _Integer


class RouterStored(_Form):
    parent_hash: _Integer | None = None
    blocks: list[StoredBlock]


class RouterRemoved(_Form):
    block_hashes: list[_Integer]


class StoredData(_Form):
    stored: RouterStored


class RemovedData(_Form):
    removed: RouterRemoved


class RouterEvent(_Form):
    """One event. `event_id` counts without gaps within one engine process."""

    event_id: Annotated[int, Field(strict=True, ge=0, le=MAX_HASH)]
    data: StoredData | RemovedData | Literal["cleared"]
    dp_rank: Rank | None = None


class RouterFields(_Form):
    """The fields of a router protocol batch other than its events. `shutdown`: the engine is about to stop."""

    shutdown: bool = False
    load: dict[str, Any] | None = None


class RouterEvents(RouterFields):
    """A batch of the router protocol (Dynamo's `KvCacheEvents`)."""

    events: list[RouterEvent]


ENGINE_EVENT: TypeAdapter[BlockStored | BlockRemoved | AllBlocksCleared] = TypeAdapter(
    Annotated[BlockStored | BlockRemoved | AllBlocksCleared, Field(discriminator="type")],
    config=ConfigDict(defer_build=True),
)


def json_schema() -> dict[str, Any]:
    """The JSON Schema for a batch in either form."""
    schema = TypeAdapter(EventBatch | RouterEvents).json_schema()
    return {"$schema": SCHEMA_URL, "title": "kvatlas open event forms", **schema}
