from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOPPING_FALSE: _ClassVar[EarlyStopping]
    EARLY_STOPPING_TRUE: _ClassVar[EarlyStopping]
    EARLY_STOPPING_NEVER: _ClassVar[EarlyStopping]

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_NONE: _ClassVar[Finish]
    FINISH_STOP: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]
EARLY_STOPPING_FALSE: EarlyStopping
EARLY_STOPPING_TRUE: EarlyStopping
EARLY_STOPPING_NEVER: EarlyStopping
FINISH_NONE: Finish
FINISH_STOP: Finish
FINISH_LENGTH: Finish

class ToWorker(_message.Message):
    __slots__ = ("number", "hello", "submit", "send", "drop", "heartbeat", "resync_cache", "connect_peers")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    YIELD_FIELD_NUMBER: _ClassVar[int]
    SEND_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    RESYNC_CACHE_FIELD_NUMBER: _ClassVar[int]
    CONNECT_PEERS_FIELD_NUMBER: _ClassVar[int]
    number: int
    hello: Hello
    submit: Submit
    send: Send
    drop: Drop
    heartbeat: Heartbeat
    resync_cache: ResyncCache
    connect_peers: ConnectPeers
    def __init__(self, number: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., send: _Optional[_Union[Send, _Mapping]] = ..., drop: _Optional[_Union[Drop, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., resync_cache: _Optional[_Union[ResyncCache, _Mapping]] = ..., connect_peers: _Optional[_Union[ConnectPeers, _Mapping]] = ..., **kwargs) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "router", "incarnation", "cache_events")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CACHE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    router: str
    incarnation: str
    cache_events: bool
    def __init__(self, protocol: _Optional[int] = ..., router: _Optional[str] = ..., incarnation: _Optional[str] = ..., cache_events: _Optional[bool] = ...) -> None: ...

class ResyncCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ConnectPeers(_message.Message):
    __slots__ = ("destinations",)
    DESTINATIONS_FIELD_NUMBER: _ClassVar[int]
    destinations: _containers.RepeatedCompositeFieldContainer[TransferEndpoint]
    def __init__(self, destinations: _Optional[_Iterable[_Union[TransferEndpoint, _Mapping]]] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request", "attempt", "prompt", "log", "params", "source", "yield_after", "salt", "request_id", "prompt_known")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    LOG_FIELD_NUMBER: _ClassVar[int]
    PARAMS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    YIELD_AFTER_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_KNOWN_FIELD_NUMBER: _ClassVar[int]
    request: int
    attempt: int
    prompt: bytes
    log: _containers.RepeatedCompositeFieldContainer[ChoiceLog]
    params: SamplingParams
    source: Source
    yield_after: int
    salt: bytes
    request_id: str
    prompt_known: int
    def __init__(self, request: _Optional[int] = ..., attempt: _Optional[int] = ..., prompt: _Optional[bytes] = ..., log: _Optional[_Iterable[_Union[ChoiceLog, _Mapping]]] = ..., params: _Optional[_Union[SamplingParams, _Mapping]] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., yield_after: _Optional[int] = ..., salt: _Optional[bytes] = ..., request_id: _Optional[str] = ..., prompt_known: _Optional[int] = ...) -> None: ...

class ChoiceLog(_message.Message):
    __slots__ = ("choice", "finished", "tokens")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    finished: bool
    tokens: bytes
    def __init__(self, choice: _Optional[int] = ..., finished: _Optional[bool] = ..., tokens: _Optional[bytes] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("worker", "incarnation", "attempt", "kv_len", "layout")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KV_LEN_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: str
    attempt: int
    kv_len: int
    layout: str
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., attempt: _Optional[int] = ..., kv_len: _Optional[int] = ..., layout: _Optional[str] = ...) -> None: ...

class Yield(_message.Message):
    __slots__ = ("request", "attempt")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request: int
    attempt: int
    def __init__(self, request: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Send(_message.Message):
    __slots__ = ("request", "attempt", "to", "epoch", "have", "to_attempt")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    TO_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request: int
    attempt: int
    to: TransferEndpoint
    epoch: int
    have: int
    to_attempt: int
    def __init__(self, request: _Optional[int] = ..., attempt: _Optional[int] = ..., to: _Optional[_Union[TransferEndpoint, _Mapping]] = ..., epoch: _Optional[int] = ..., have: _Optional[int] = ..., to_attempt: _Optional[int] = ...) -> None: ...

class TransferEndpoint(_message.Message):
    __slots__ = ("worker", "incarnation", "address", "secret")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SECRET_FIELD_NUMBER: _ClassVar[int]
    worker: str
    incarnation: str
    address: str
    secret: str
    def __init__(self, worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., address: _Optional[str] = ..., secret: _Optional[str] = ...) -> None: ...

class Drop(_message.Message):
    __slots__ = ("request", "attempt", "choice")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    request: int
    attempt: int
    choice: int
    def __init__(self, request: _Optional[int] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "max_tokens", "min_tokens", "stop_tokens", "ignore_eos", "logprobs", "n", "logit_bias", "typical_p", "bad_words", "allowed_tokens", "prompt_logprobs", "beams", "structured_outputs", "thinking_budget")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BEAMS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    THINKING_BUDGET_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop_tokens: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    n: int
    logit_bias: _containers.ScalarMap[int, float]
    typical_p: float
    bad_words: _containers.RepeatedCompositeFieldContainer[BadWord]
    allowed_tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: int
    beams: BeamSearch
    structured_outputs: StructuredOutputs
    thinking_budget: ThinkingBudget
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_tokens: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[int] = ..., n: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., typical_p: _Optional[float] = ..., bad_words: _Optional[_Iterable[_Union[BadWord, _Mapping]]] = ..., allowed_tokens: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[int] = ..., beams: _Optional[_Union[BeamSearch, _Mapping]] = ..., structured_outputs: _Optional[_Union[StructuredOutputs, _Mapping]] = ..., thinking_budget: _Optional[_Union[ThinkingBudget, _Mapping]] = ...) -> None: ...

class ThinkingBudget(_message.Message):
    __slots__ = ("num_tokens", "end", "start")
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    num_tokens: int
    end: int
    start: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, num_tokens: _Optional[int] = ..., end: _Optional[int] = ..., start: _Optional[_Iterable[int]] = ...) -> None: ...

class StructuredOutputs(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class BeamSearch(_message.Message):
    __slots__ = ("width", "length_penalty", "early_stopping")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    width: int
    length_penalty: float
    early_stopping: EarlyStopping
    def __init__(self, width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ...) -> None: ...

class BadWord(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class ToRouter(_message.Message):
    __slots__ = ("number", "welcome", "step", "yielded", "ready", "received", "failed", "rejected", "draining", "cache_snapshot", "heartbeat")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    YIELDED_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    CACHE_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    number: int
    welcome: Welcome
    step: Step
    yielded: Yielded
    ready: Ready
    received: Received
    failed: Failed
    rejected: Rejected
    draining: Draining
    cache_snapshot: CacheSnapshot
    heartbeat: Heartbeat
    def __init__(self, number: _Optional[int] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., yielded: _Optional[_Union[Yielded, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., received: _Optional[_Union[Received, _Mapping]] = ..., failed: _Optional[_Union[Failed, _Mapping]] = ..., rejected: _Optional[_Union[Rejected, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ..., cache_snapshot: _Optional[_Union[CacheSnapshot, _Mapping]] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "worker", "incarnation", "role", "model", "layout", "block_size", "num_blocks", "max_model_len", "max_sequences", "eos_tokens", "vocab_size", "load", "step_bounds", "machine", "transfer", "step_token_bounds", "max_batched_tokens", "enough_prompt_tokens")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    STEP_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    MACHINE_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKEN_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENOUGH_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    worker: str
    incarnation: str
    role: str
    model: str
    layout: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_sequences: int
    eos_tokens: _containers.RepeatedScalarFieldContainer[int]
    vocab_size: int
    load: Load
    step_bounds: _containers.RepeatedScalarFieldContainer[float]
    machine: str
    transfer: TransferEndpoint
    step_token_bounds: _containers.RepeatedScalarFieldContainer[int]
    max_batched_tokens: int
    enough_prompt_tokens: int
    def __init__(self, protocol: _Optional[int] = ..., worker: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., model: _Optional[str] = ..., layout: _Optional[str] = ..., block_size: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., max_sequences: _Optional[int] = ..., eos_tokens: _Optional[_Iterable[int]] = ..., vocab_size: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., step_bounds: _Optional[_Iterable[float]] = ..., machine: _Optional[str] = ..., transfer: _Optional[_Union[TransferEndpoint, _Mapping]] = ..., step_token_bounds: _Optional[_Iterable[int]] = ..., max_batched_tokens: _Optional[int] = ..., enough_prompt_tokens: _Optional[int] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("request", "attempt", "choice", "position", "token", "finish", "logprobs", "ended", "load", "prompts", "cached", "cache", "preempted")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    request: _containers.RepeatedScalarFieldContainer[int]
    attempt: _containers.RepeatedScalarFieldContainer[int]
    choice: _containers.RepeatedScalarFieldContainer[int]
    position: _containers.RepeatedScalarFieldContainer[int]
    token: _containers.RepeatedScalarFieldContainer[int]
    finish: _containers.RepeatedScalarFieldContainer[Finish]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    ended: _containers.RepeatedCompositeFieldContainer[Ended]
    load: Load
    prompts: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    cached: _containers.RepeatedCompositeFieldContainer[CachedPrompt]
    cache: CacheEvents
    preempted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request: _Optional[_Iterable[int]] = ..., attempt: _Optional[_Iterable[int]] = ..., choice: _Optional[_Iterable[int]] = ..., position: _Optional[_Iterable[int]] = ..., token: _Optional[_Iterable[int]] = ..., finish: _Optional[_Iterable[_Union[Finish, str]]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[Ended, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., prompts: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ..., cached: _Optional[_Iterable[_Union[CachedPrompt, _Mapping]]] = ..., cache: _Optional[_Union[CacheEvents, _Mapping]] = ..., preempted: _Optional[_Iterable[int]] = ...) -> None: ...

class CachedPrompt(_message.Message):
    __slots__ = ("request", "attempt", "tokens")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    request: int
    attempt: int
    tokens: int
    def __init__(self, request: _Optional[int] = ..., attempt: _Optional[int] = ..., tokens: _Optional[int] = ...) -> None: ...

class CacheEvents(_message.Message):
    __slots__ = ("incarnation", "first", "changes")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    first: int
    changes: _containers.RepeatedCompositeFieldContainer[CacheChange]
    def __init__(self, incarnation: _Optional[str] = ..., first: _Optional[int] = ..., changes: _Optional[_Iterable[_Union[CacheChange, _Mapping]]] = ...) -> None: ...

class CacheChange(_message.Message):
    __slots__ = ("evicted", "stored", "parents", "lengths")
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    evicted: _containers.RepeatedScalarFieldContainer[int]
    stored: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, evicted: _Optional[_Iterable[int]] = ..., stored: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class CacheSnapshot(_message.Message):
    __slots__ = ("incarnation", "next", "chunk", "last", "blocks")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    next: int
    chunk: int
    last: bool
    blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, incarnation: _Optional[str] = ..., next: _Optional[int] = ..., chunk: _Optional[int] = ..., last: _Optional[bool] = ..., blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("request", "attempt", "position", "entries")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    request: int
    attempt: int
    position: int
    entries: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, request: _Optional[int] = ..., attempt: _Optional[int] = ..., position: _Optional[int] = ..., entries: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("row", "chosen", "tokens", "values", "rank")
    ROW_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    row: int
    chosen: float
    tokens: _containers.RepeatedScalarFieldContainer[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    rank: int
    def __init__(self, row: _Optional[int] = ..., chosen: _Optional[float] = ..., tokens: _Optional[_Iterable[int]] = ..., values: _Optional[_Iterable[float]] = ..., rank: _Optional[int] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("request", "attempt", "reason")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request: int
    attempt: int
    reason: str
    def __init__(self, request: _Optional[int] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("queued", "queued_tokens", "running", "free_blocks", "cached_blocks", "leased_blocks", "step_micros", "steps", "prompt_tokens_computed", "prompt_tokens_cached", "bytes_received", "bytes_sent", "preemptions", "reserved_blocks", "used_blocks", "unwritten_slots", "step_counts", "step_seconds", "prompt_seconds", "expert_imbalance", "step_token_counts", "step_tokens", "receiving", "awaiting_grammar")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEP_MICROS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BYTES_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    BYTES_SENT_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    UNWRITTEN_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STEP_COUNTS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_IMBALANCE_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKEN_COUNTS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RECEIVING_FIELD_NUMBER: _ClassVar[int]
    AWAITING_GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    queued: int
    queued_tokens: int
    running: int
    free_blocks: int
    cached_blocks: int
    leased_blocks: int
    step_micros: int
    steps: int
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    bytes_received: int
    bytes_sent: int
    preemptions: int
    reserved_blocks: int
    used_blocks: int
    unwritten_slots: int
    step_counts: _containers.RepeatedScalarFieldContainer[int]
    step_seconds: float
    prompt_seconds: float
    expert_imbalance: float
    step_token_counts: _containers.RepeatedScalarFieldContainer[int]
    step_tokens: int
    receiving: int
    awaiting_grammar: int
    def __init__(self, queued: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., running: _Optional[int] = ..., free_blocks: _Optional[int] = ..., cached_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., step_micros: _Optional[int] = ..., steps: _Optional[int] = ..., prompt_tokens_computed: _Optional[int] = ..., prompt_tokens_cached: _Optional[int] = ..., bytes_received: _Optional[int] = ..., bytes_sent: _Optional[int] = ..., preemptions: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., used_blocks: _Optional[int] = ..., unwritten_slots: _Optional[int] = ..., step_counts: _Optional[_Iterable[int]] = ..., step_seconds: _Optional[float] = ..., prompt_seconds: _Optional[float] = ..., expert_imbalance: _Optional[float] = ..., step_token_counts: _Optional[_Iterable[int]] = ..., step_tokens: _Optional[int] = ..., receiving: _Optional[int] = ..., awaiting_grammar: _Optional[int] = ...) -> None: ...

class Yielded(_message.Message):
    __slots__ = ("request", "attempt", "kv_len")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KV_LEN_FIELD_NUMBER: _ClassVar[int]
    request: int
    attempt: int
    kv_len: int
    def __init__(self, request: _Optional[int] = ..., attempt: _Optional[int] = ..., kv_len: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ("request", "attempt", "epoch", "have", "at")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    request: int
    attempt: int
    epoch: int
    have: int
    at: TransferEndpoint
    def __init__(self, request: _Optional[int] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ..., have: _Optional[int] = ..., at: _Optional[_Union[TransferEndpoint, _Mapping]] = ...) -> None: ...

class Received(_message.Message):
    __slots__ = ("request", "attempt", "epoch", "bytes")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    request: int
    attempt: int
    epoch: int
    bytes: int
    def __init__(self, request: _Optional[int] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...

class Failed(_message.Message):
    __slots__ = ("request", "attempt", "epoch", "reason")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request: int
    attempt: int
    epoch: int
    reason: str
    def __init__(self, request: _Optional[int] = ..., attempt: _Optional[int] = ..., epoch: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Rejected(_message.Message):
    __slots__ = ("request", "attempt", "reason", "never")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NEVER_FIELD_NUMBER: _ClassVar[int]
    request: int
    attempt: int
    reason: str
    never: bool
    def __init__(self, request: _Optional[int] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ..., never: _Optional[bool] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepRecords(_message.Message):
    __slots__ = ("number", "ended", "seconds", "tokens", "sequences", "positions", "pairs")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    number: _containers.RepeatedScalarFieldContainer[int]
    ended: _containers.RepeatedScalarFieldContainer[float]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    sequences: _containers.RepeatedScalarFieldContainer[int]
    positions: _containers.RepeatedScalarFieldContainer[int]
    pairs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, number: _Optional[_Iterable[int]] = ..., ended: _Optional[_Iterable[float]] = ..., seconds: _Optional[_Iterable[float]] = ..., tokens: _Optional[_Iterable[int]] = ..., sequences: _Optional[_Iterable[int]] = ..., positions: _Optional[_Iterable[int]] = ..., pairs: _Optional[_Iterable[float]] = ...) -> None: ...
