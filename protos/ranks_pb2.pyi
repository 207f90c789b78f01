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
    __slots__ = ("plan", "move", "capture")
    PLAN_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_FIELD_NUMBER: _ClassVar[int]
    plan: Plan
    move: Move
    capture: Capture
    def __init__(self, plan: _Optional[_Union[Plan, _Mapping]] = ..., move: _Optional[_Union[Move, _Mapping]] = ..., capture: _Optional[_Union[Capture, _Mapping]] = ...) -> None: ...

class Capture(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Move(_message.Message):
    __slots__ = ("rank", "end", "open", "value", "send", "receive", "close", "settle")
    RANK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    SETTLE_FIELD_NUMBER: _ClassVar[int]
    rank: int
    end: int
    open: Open
    value: Value
    send: Piece
    receive: Piece
    close: Close
    settle: int
    def __init__(self, rank: _Optional[int] = ..., end: _Optional[int] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., value: _Optional[_Union[Value, _Mapping]] = ..., send: _Optional[_Union[Piece, _Mapping]] = ..., receive: _Optional[_Union[Piece, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., settle: _Optional[int] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("receives",)
    RECEIVES_FIELD_NUMBER: _ClassVar[int]
    receives: bool
    def __init__(self, receives: _Optional[bool] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: bytes
    def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...

class Piece(_message.Message):
    __slots__ = ("epoch", "index", "blocks", "start", "stop", "first_layer", "last_layer", "first_head", "last_head", "unit")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    LAST_LAYER_FIELD_NUMBER: _ClassVar[int]
    FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
    LAST_HEAD_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    index: int
    blocks: bytes
    start: int
    stop: int
    first_layer: int
    last_layer: int
    first_head: int
    last_head: int
    unit: int
    def __init__(self, epoch: _Optional[int] = ..., index: _Optional[int] = ..., blocks: _Optional[bytes] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ..., first_layer: _Optional[int] = ..., last_layer: _Optional[int] = ..., first_head: _Optional[int] = ..., last_head: _Optional[int] = ..., unit: _Optional[int] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Report(_message.Message):
    __slots__ = ("end", "value", "met", "moved", "settled", "closed")
    END_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    MET_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    end: int
    value: Value
    met: Outcome
    moved: Outcome
    settled: int
    closed: Close
    def __init__(self, end: _Optional[int] = ..., value: _Optional[_Union[Value, _Mapping]] = ..., met: _Optional[_Union[Outcome, _Mapping]] = ..., moved: _Optional[_Union[Outcome, _Mapping]] = ..., settled: _Optional[int] = ..., closed: _Optional[_Union[Close, _Mapping]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("epoch", "index", "bytes", "problem", "broken")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    index: int
    bytes: int
    problem: str
    broken: str
    def __init__(self, epoch: _Optional[int] = ..., index: _Optional[int] = ..., bytes: _Optional[int] = ..., problem: _Optional[str] = ..., broken: _Optional[str] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("number", "rows", "tokens", "positions", "query_starts", "context_lens", "block_tables", "slots", "samples", "copies", "forks", "scored", "ahead")
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
    AHEAD_FIELD_NUMBER: _ClassVar[int]
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
    ahead: bool
    def __init__(self, number: _Optional[int] = ..., rows: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., positions: _Optional[bytes] = ..., query_starts: _Optional[bytes] = ..., context_lens: _Optional[bytes] = ..., block_tables: _Optional[bytes] = ..., slots: _Optional[bytes] = ..., samples: _Optional[bytes] = ..., copies: _Optional[bytes] = ..., forks: _Optional[bytes] = ..., scored: _Optional[bytes] = ..., ahead: _Optional[bool] = ...) -> None: ...
