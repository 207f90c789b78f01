from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FromSource(_message.Message):
    __slots__ = ("introduction", "value", "header", "end")
    INTRODUCTION_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    introduction: Introduction
    value: StoreValue
    header: Header
    end: End
    def __init__(self, introduction: _Optional[_Union[Introduction, _Mapping]] = ..., value: _Optional[_Union[StoreValue, _Mapping]] = ..., header: _Optional[_Union[Header, _Mapping]] = ..., end: _Optional[_Union[End, _Mapping]] = ...) -> None: ...

class FromDestination(_message.Message):
    __slots__ = ("accepted", "value", "credit", "outcome")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    value: StoreValue
    credit: Credit
    outcome: Outcome
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., value: _Optional[_Union[StoreValue, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ..., outcome: _Optional[_Union[Outcome, _Mapping]] = ...) -> None: ...

class Introduction(_message.Message):
    __slots__ = ("protocol", "worker", "incarnation", "layout", "block_size", "ranks", "early")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    EARLY_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    worker: str
    incarnation: str
    layout: str
    block_size: int
    ranks: _containers.RepeatedCompositeFieldContainer[Holding]
    early: bool
    def __init__(self, protocol: _Optional[int] = ..., worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., layout: _Optional[str] = ..., block_size: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ..., early: _Optional[bool] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("first_layer", "last_layer", "first_head", "last_head")
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    LAST_HEAD_FIELD_NUMBER: _ClassVar[int]
    first_layer: int
    last_layer: int
    first_head: int
    last_head: int
    def __init__(self, first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ..., first_head: _Optional[int] = ..., last_head: _Optional[int] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("generation", "backend", "block_size", "ranks")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    generation: int
    backend: str
    block_size: int
    ranks: _containers.RepeatedCompositeFieldContainer[Holding]
    def __init__(self, generation: _Optional[int] = ..., backend: _Optional[str] = ..., block_size: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[Holding, _Mapping]]] = ...) -> None: ...

class StoreValue(_message.Message):
    __slots__ = ("key", "value", "source_rank", "destination_rank")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_RANK_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_RANK_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    source_rank: int
    destination_rank: int
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ..., source_rank: _Optional[int] = ..., destination_rank: _Optional[int] = ...) -> None: ...

class Header(_message.Message):
    __slots__ = ("router", "request", "attempt", "epoch", "index", "start", "stop", "first_layer", "last_layer", "first_head", "last_head", "bytes", "source_rank", "destination_rank")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    LAST_HEAD_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_RANK_FIELD_NUMBER: _ClassVar[int]
    DESTINATION_RANK_FIELD_NUMBER: _ClassVar[int]
    router: str
    request: int
    attempt: int
    epoch: int
    index: int
    start: int
    stop: int
    first_layer: int
    last_layer: int
    first_head: int
    last_head: int
    bytes: int
    source_rank: int
    destination_rank: int
    def __init__(self, router: _Optional[str] = ..., request: _Optional[int] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ..., index: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ..., first_head: _Optional[int] = ..., last_head: _Optional[int] = ..., bytes: _Optional[int] = ..., source_rank: _Optional[int] = ..., destination_rank: _Optional[int] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("epoch", "index", "discard")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    DISCARD_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    index: int
    discard: bool
    def __init__(self, epoch: _Optional[int] = ..., index: _Optional[int] = ..., discard: _Optional[bool] = ...) -> None: ...

class End(_message.Message):
    __slots__ = ("epoch", "aborted", "messages")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    aborted: bool
    messages: int
    def __init__(self, epoch: _Optional[int] = ..., aborted: _Optional[bool] = ..., messages: _Optional[int] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("epoch", "received", "reason")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    received: bool
    reason: str
    def __init__(self, epoch: _Optional[int] = ..., received: _Optional[bool] = ..., reason: _Optional[str] = ...) -> None: ...
