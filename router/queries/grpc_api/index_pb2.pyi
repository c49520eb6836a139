from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OverlapRequest(_message.Message):
    __slots__ = ("model", "adapter", "token_ids", "hashes", "block_size", "cache_salt", "text")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    model: str
    adapter: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    hashes: _containers.RepeatedScalarFieldContainer[int]
    block_size: int
    cache_salt: str
    text: str
    def __init__(self, model: _Optional[str] = ..., adapter: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., hashes: _Optional[_Iterable[int]] = ..., block_size: _Optional[int] = ..., cache_salt: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class OverlapResponse(_message.Message):
    __slots__ = ("holders",)
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[Holder]
    def __init__(self, holders: _Optional[_Iterable[_Union[Holder, _Mapping]]] = ...) -> None: ...

class Holder(_message.Message):
    __slots__ = ("worker", "instance", "dp_rank", "url", "routable", "block_size", "resident_tokens", "usable_tokens", "runs")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    DP_RANK_FIELD_NUMBER: _ClassVar[int]
    URL_FIELD_NUMBER: _ClassVar[int]
    ROUTABLE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    USABLE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    instance: str
    dp_rank: int
    url: str
    routable: bool
    block_size: int
    resident_tokens: int
    usable_tokens: int
    runs: _containers.RepeatedCompositeFieldContainer[Run]
    def __init__(self, worker: _Optional[str] = ..., instance: _Optional[str] = ..., dp_rank: _Optional[int] = ..., url: _Optional[str] = ..., routable: _Optional[bool] = ..., block_size: _Optional[int] = ..., resident_tokens: _Optional[int] = ..., usable_tokens: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[Run, _Mapping]]] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("tokens", "tiers")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    tiers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tokens: _Optional[int] = ..., tiers: _Optional[_Iterable[str]] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("position",)
    POSITION_FIELD_NUMBER: _ClassVar[int]
    position: str
    def __init__(self, position: _Optional[str] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("position", "kind", "data")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    position: str
    kind: str
    data: str
    def __init__(self, position: _Optional[str] = ..., kind: _Optional[str] = ..., data: _Optional[str] = ...) -> None: ...
