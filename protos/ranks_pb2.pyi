from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Key(_message.Message):
    __slots__ = ("key",)
    KEY_FIELD_NUMBER: _ClassVar[int]
    key: str
    def __init__(self, key: _Optional[str] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class Order(_message.Message):
    __slots__ = ("plan", "send", "take")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    TAKE_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    send: Blocks
    take: Blocks
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ..., send: _Optional[_Union[Blocks, _Mapping]] = ..., take: _Optional[_Union[Blocks, _Mapping]] = ...) -> None: ...

class Blocks(_message.Message):
    __slots__ = ("rank", "blocks", "first_layer", "last_layer", "first_head", "last_head")
    RANK_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    LAST_HEAD_FIELD_NUMBER: _ClassVar[int]
    rank: int
    blocks: bytes
    first_layer: int
    last_layer: int
    first_head: int
    last_head: int
    def __init__(self, rank: _Optional[int] = ..., blocks: _Optional[bytes] = ..., first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ..., first_head: _Optional[int] = ..., last_head: _Optional[int] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("number", "rows", "tokens", "positions", "query_starts", "context_lens", "block_tables", "slots", "samples", "copies", "forks", "scored")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    QUERY_STARTS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TABLES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    FORKS_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    number: int
    rows: bytes
    tokens: bytes
    positions: bytes
    query_starts: bytes
    context_lens: bytes
    block_tables: bytes
    slots: bytes
    samples: bytes
    copies: bytes
    forks: bytes
    scored: bytes
    def __init__(self, number: _Optional[int] = ..., rows: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., query_starts: _Optional[bytes] = ..., context_lens: _Optional[bytes] = ..., block_tables: _Optional[bytes] = ..., slots: _Optional[bytes] = ..., samples: _Optional[bytes] = ..., copies: _Optional[bytes] = ..., forks: _Optional[bytes] = ..., scored: _Optional[bytes] = ...) -> None: ...
