"""A request as routers see it (hints, shape), and a worker as a candidate for a request (selection result)."""

from collections.abc import Sequence
from dataclasses import field
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from kvatlas.blocks.external_chain import MAX_HASH, MIN_HASH, ROOT, hash_text
from kvatlas.blocks.hashing import MAX_TOKEN_ID, extend_chain, unpack_hashes
from kvatlas.blocks.media import MediaItem, media_keys
from kvatlas.blocks.residency import BlockKey
from kvatlas.blocks.reuse import ALL_READABLE, CacheReading
from kvatlas.cost.protocol import Cost, CostTerm, Plan
from kvatlas.dataclass import dataclass
from kvatlas.errors import InvalidValue
from kvatlas.identity import DEFAULT_TENANT, OWN_CHAIN, Scope, check_chain
from kvatlas.reservations.room_and_slo import MISSES_SLO, NO_ROOM, NOTHING, Over
from kvatlas.validation import DEFAULT_DECODE_TOKENS, Count, OutputTokens, Positive, describe_mistake

DEFAULT_BLOCK_TOKENS = 64
MAX_MEDIA = 1_024


def _block_hash(value: Any) -> Any:
    if type(value) is int:
        if not MIN_HASH <= value <= MAX_HASH:
            raise ValueError("expected an integer from -2^63 to 2^64-1, or text")
        return hash_text(value)
    return value


BlockHash = Annotated[str, BeforeValidator(_block_hash), Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID, strict=True)]
NonEmpty = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Fallbacks:
    """Values for the fields that a request's hints leave out, usually taken from the router's own settings.

    If there is no tokenizer here or in the hints, the model id also names the tokenizer.
    """

    model_id: str | None = None
    tokenizer_id: str | None = None
    adapter_id: str | None = None
    tenant_id: str = DEFAULT_TENANT
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    estimated_decode_tokens: int = DEFAULT_DECODE_TOKENS
    block_bytes: int = 0


class Slo(BaseModel):
    """What the caller aims for: a time to the first token, and a time for each later token, in milliseconds."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="allow")

    ttft_ms: Annotated[float, Field(gt=0)] = 800
    tpot_ms: Annotated[float, Field(gt=0)] = 80


DEFAULT_SLO = Slo()


class BlockHint(BaseModel):
    """One block of a prompt, with a size of its own: `token_count` tokens, and `bytes` of KV cache (None: the size that the
    request gives for all blocks)."""

    model_config = ConfigDict(defer_build=True, frozen=True, extra="forbid")

    block_hash: BlockHash
    token_count: Positive
    bytes: Count | None = None


class RequestHints(BaseModel):
    """A caller's description of a request, as JSON or as keyword arguments; only the prompt is required.

    A prompt is given as `token_ids`; as precomputed `block_hashes` of blocks of `block_tokens` tokens each, which are 64-bit
    integers or text; or as `blocks`, each with such a hash and a size; only the last one may have fewer tokens. `chain`: the
    kind of these hashes, sequence hashes (`own`) or an engine's own hashes (`external:<name>`); by default `own` if all of them
    can be, otherwise `external:default`. Unknown fields are listed in `ignored_fields`. `token_count` is the length of the
    prompt if the hashes leave out its partial last block. `labels`, `allow` and `deny` restrict the workers that may get the
    request. `cache_reading`: the request's limits on reading the engine's prefix cache (`skip`, `prompt_logprobs`,
    `logprob_start_len`). `media`: images among the `token_ids` (`id`, `offset`, `length`).
    """

    model_config = ConfigDict(defer_build=True, frozen=True, extra="allow", protected_namespaces=())

    request_id: NonEmpty | None = None
    model_id: NonEmpty | None = None
    tokenizer_id: NonEmpty | None = None
    adapter_id: NonEmpty | None = None
    tenant_id: NonEmpty | None = None
    session_id: NonEmpty | None = None
    block_hashes: tuple[BlockHash, ...] | None = None
    blocks: tuple[BlockHint, ...] | None = None
    chain: Annotated[str, AfterValidator(check_chain)] | None = None
    token_ids: tuple[TokenId, ...] | None = None
    token_count: Count | None = None
    block_tokens: Positive | None = None
    estimated_decode_tokens: OutputTokens | None = None
    block_bytes: Count | None = None
    slo: Slo = DEFAULT_SLO
    labels: dict[str, str] = Field(default_factory=dict)
    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    cache_reading: CacheReading = ALL_READABLE
    media: Annotated[tuple[MediaItem, ...], Field(max_length=MAX_MEDIA)] = ()

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Build hints from parsed JSON. Raises InvalidValue, naming the first invalid field."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(str(part) for part in first["loc"])
            raise InvalidValue(describe_mistake(f"request field {path}" if path else "the request", first)) from error

    @property
    def ignored_fields(self) -> Sequence[str]:
        """Names of unknown fields."""
        return sorted([*(self.model_extra or ()), *(f"slo.{name}" for name in self.slo.model_extra or ())])

    @property
    def _what(self) -> str:
        """How errors refer to the request."""
        return "request" if self.request_id is None else f"request {self.request_id}"

    def scope(self, fallbacks: Fallbacks) -> Scope:
        """The request's identity scope, with the chain that the hints name. Raises InvalidValue if neither the hints nor the
        fallbacks name a model."""
        model_id = self.model_id or fallbacks.model_id
        if not model_id:
            raise InvalidValue(f"{self._what} names no model_id, and there is no fallback")
        return Scope(
            model_id,
            self.tokenizer_id or fallbacks.tokenizer_id or model_id,
            self.adapter_id or fallbacks.adapter_id,
            self.tenant_id or fallbacks.tenant_id,
            self.chain or OWN_CHAIN,
        )

    def to_blocks(self, fallbacks: Fallbacks) -> tuple[BlockKey, ...]:
        """The keys of the prompt's full blocks, and of the last one of `blocks`.

        The prefix_hash of a key is the hash of the previous block; for the first block, it is the session id or "root". Raises
        InvalidValue if the prompt is given twice or not at all, or if no model is named.
        """
        scope = self.scope(fallbacks)
        size = self.block_tokens or fallbacks.block_tokens
        keys: list[BlockKey] = []
        prefix = self.session_id or ROOT
        for index, block_hash in enumerate(self._hashes(size)):
            tokens = size if self.blocks is None else self.blocks[index].token_count
            keys.append(BlockKey(scope, prefix, block_hash, index, tokens))
            prefix = block_hash
        return tuple(keys)

    def to_shape(self, fallbacks: Fallbacks) -> "RequestShape":
        """The request as cost and ranking see it. Raises InvalidValue in the same cases as `to_blocks`."""
        blocks = self.to_blocks(fallbacks)
        in_blocks = sum(key.token_count for key in blocks)
        total = len(self.token_ids) if self.token_ids is not None else self.token_count
        if total is not None and total < in_blocks:
            raise InvalidValue(f"{self._what} has token_count {total}; its blocks alone hold {in_blocks}")
        decode = self.estimated_decode_tokens
        return RequestShape(
            id=self.request_id,
            scope=self.scope(fallbacks),
            blocks=blocks,
            estimated_decode_tokens=fallbacks.estimated_decode_tokens if decode is None else decode,
            slo=self.slo,
            tail_tokens=0 if total is None else total - in_blocks,
        )

    def _hashes(self, size: int) -> Sequence[str]:
        if self.token_ids is not None and (self.chain or OWN_CHAIN) != OWN_CHAIN:
            raise InvalidValue(
                f"{self._what} has chain {self.chain}, and token_ids; expected block_hashes of that chain"
            )
        given = [name for name in ("token_ids", "block_hashes", "blocks") if getattr(self, name) is not None]
        if len(given) != 1:
            several = f"both {' and '.join(given)}" if given else "neither of token_ids, block_hashes and blocks"
            raise InvalidValue(f"{self._what} gives {several}; expected one of them")
        if self.block_hashes is not None:
            return self.block_hashes
        if self.blocks is not None:
            return [one.block_hash for one in self.blocks]
        assert self.token_ids is not None
        keys = media_keys(self.media, size, len(self.token_ids) // size) if self.media else None
        return [hash_text(value) for value in unpack_hashes(extend_chain(self.token_ids, size, None, keys))]


@dataclass(frozen=True, slots=True)
class RequestShape:
    """A request as cost and ranking see it. `tail_tokens` are the tokens after the last full block."""

    id: str | None
    scope: Scope
    blocks: tuple[BlockKey, ...]
    estimated_decode_tokens: int = DEFAULT_DECODE_TOKENS
    slo: Slo = DEFAULT_SLO
    tail_tokens: int = 0

    @property
    def input_tokens(self) -> int:
        """The number of prompt tokens: all blocks and the tail."""
        return sum(key.token_count for key in self.blocks) + self.tail_tokens


@dataclass(frozen=True, slots=True)
class SelectionResult:
    """One worker as a candidate for a request, and what the request would cost there.

    All block counts are in the worker's own block size. `required_blocks`: the number of the prompt's blocks, including its
    partial last one (which no engine keeps for other requests). `overlap_blocks`: how many of these, from the first on, the
    worker holds. `resident_tokens`: the number of tokens in them (a lower bound if the worker publishes only every g-th block).
    `usable_tokens`: how many of these its engine will reuse. `source`: the worker whose copy it would read, for
    `transferred_tokens` more tokens; if `reads_store` is set, this is a shared store, which its engine reads without being
    asked. `predicted_tokens`: additional tokens that it is predicted to hold, because they are being computed there, or were
    computed by an engine without events; no event has confirmed them. `load_known=False`: the load is the pool's mean. `over`:
    what the worker has no room for, and which part of the request's SLO it would miss. `plan`: the plan that was priced. `why`:
    why the worker can't hold any of the prompt's blocks, if it can't.
    """

    worker_id: str
    required_blocks: int
    overlap_blocks: int
    resident_tokens: int
    usable_tokens: int
    cost: Cost
    source: str | None = None
    transferred_tokens: int = 0
    load_known: bool = True
    predicted_tokens: int = 0
    over: Over = NOTHING
    plan: Plan | None = field(default=None, compare=False, repr=False)
    upper_bound: str = ""
    why: str = ""
    reads_store: bool = False

    @property
    def source_kind(self) -> str | None:
        """The kind of `source`: `worker` or `store`; None if there is no source."""
        return None if self.source is None else "store" if self.reads_store else "worker"

    @property
    def cached_tokens(self) -> int:
        """The number of tokens that its engine should report as cached."""
        return self.usable_tokens + self.transferred_tokens + self.predicted_tokens

    @property
    def score_us(self) -> int:
        return self.cost.score_us

    @property
    def terms(self) -> tuple[CostTerm, ...]:
        """The terms of the cost; they add up to the score."""
        return self.cost.terms

    def explain(self) -> str:
        """The explanation as one line: the overlap, then the cost term by term."""
        text = (
            f"{self.worker_id}: {self.overlap_blocks} of {self.required_blocks} blocks resident, "
            f"{'at most ' if self.upper_bound else ''}{self.usable_tokens} tokens usable"
        )
        for note in filter(None, (self.upper_bound, self.why)):
            text += f" ({note})"
        if self.source is not None:
            text += f", {self.transferred_tokens} more read from {'store ' if self.reads_store else ''}{self.source}"
        if self.predicted_tokens:
            text += f", {self.predicted_tokens} more predicted"
        text += f"; {self.cost.explain()}"
        if not self.load_known:
            text += " (load unknown: the pool's mean)"
        if full := self.over & NO_ROOM:
            text += f" (no room: {', '.join(full.names)})"
        if missed := self.over & MISSES_SLO:
            text += f" (misses its SLO: {', '.join(missed.names)})"
        return text

    def explanation(self) -> dict[str, Any]:
        """The explanation as plain data, for JSON."""
        return {
            "worker": self.worker_id,
            "required_blocks": self.required_blocks,
            "overlap_blocks": self.overlap_blocks,
            "resident_tokens": self.resident_tokens,
            "usable_tokens": self.usable_tokens,
            "upper_bound": self.upper_bound,
            "why": self.why,
            "transferred_tokens": self.transferred_tokens,
            "predicted_tokens": self.predicted_tokens,
            "source": self.source,
            "source_kind": self.source_kind,
            "load_known": self.load_known,
            "over": list(self.over.names),
            "score_us": self.score_us,
            "ttft_us": self.cost.ttft_us,
            "tpot_us": self.cost.tpot_us,
            "terms": [{"name": t.name, "us": t.us, "amount": t.amount, "unit": t.unit} for t in self.terms],
        }
