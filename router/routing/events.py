"""Inputs (events) and outputs (commands) of the dispatcher, as plain records.

The frontend and the worker links convert messages and clock ticks to events and execute the
commands. `docs/lifecycle.md` is the specification.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any, TypeAlias

from penstock.common.sampling_params import SamplingParams
from penstock.common.worker_load import NO_LOAD, WorkerLoad
from penstock.router.routing.prefix_cache.cache_events import (
    CacheEvents,
    CacheSnapshot,
    ResyncCache,
)
from penstock.router.routing.transfer_peers import ConnectPeers, TransferEndpoint


class Finish(IntEnum):
    """Why a choice ended; the numbers are those of `Finish` in worker.proto."""

    NONE = 0
    STOP = 1
    LENGTH = 2


class Status(Enum):
    """How a request ends."""

    OK = "ok"
    CANCELLED = "cancelled"  # the client has disconnected, so no error is sent
    DEADLINE = "deadline"
    INVALID = "invalid"  # the request can never fit on any worker
    OVERLOADED = "overloaded"  # no room in the queue; the client may retry after `retry_after`
    UNAVAILABLE = "unavailable"  # no worker is connected to the router
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request, validated and tokenized."""

    id: int
    prompt: Sequence[int]
    # Sampling parameters in the form for workers (see `SamplingParams.for_worker`).
    params: SamplingParams
    num_choices: int = 1
    num_beams: int = 0  # number of beams; 0 means no beam search
    max_tokens: int = 16
    tenant: str = ""
    priority: int = 0  # as in vLLM, a tenant's requests with lower values go first
    salt: bytes = b""
    deadline: float = float("inf")  # when the request times out, on the dispatcher's clock
    log: Sequence[Sequence[int]] = ()  # tokens that the client already has, one list per choice
    ended: Sequence[bool] = ()  # for each choice, whether it ended in an earlier call
    external_id: str = ""
    # The prompt as bytes (`protos.worker_codec.pack_tokens`), or empty if not packed yet.
    packed_prompt: bytes = b""
    # For each block size, the short hashes of the prompt's full blocks (`common.block_hash`).
    prompt_hashes: Mapping[int, Sequence[int]] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        """Number of sequences that the request takes on a worker."""
        return self.num_beams or self.num_choices


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Properties of a worker, fixed for one incarnation."""

    worker: str
    incarnation: str
    role: str  # prefill, decode or mixed
    layout: str  # two workers can exchange KV blocks only if their layouts are equal
    block_size: int
    num_blocks: int
    max_model_len: int
    max_sequences: int
    step_bounds: tuple[float, ...] = ()  # bucket bounds of `WorkerLoad.step_counts` in seconds
    # Workers with the same value share the cores of a machine; empty means no sharing.
    machine: str = ""
    # Where other workers send KV blocks; None if not reported.
    transfer: TransferEndpoint | None = None
    step_token_bounds: tuple[int, ...] = ()  # bucket bounds of `WorkerLoad.step_token_counts`
    max_batched_tokens: int = 0  # maximum number of tokens of a step
    enough_prompt_tokens: int = 0  # see `SchedulerConfig` of workers


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """New tokens of a step as columns: row i of each column describes token i.

    The columns of a worker's message are passed unchanged to the detokenizers.
    """

    requests: Sequence[int] = ()
    attempts: Sequence[int] = ()
    choices: Sequence[int] = ()
    positions: Sequence[int] = ()  # index of the token in the answer, from 0
    tokens: Sequence[int] = ()
    finishes: Sequence[int] = ()  # finish reasons, which are values of `Finish`
    # `TokenLogprobs` messages by row, for rows that have them.
    logprobs: Mapping[int, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Yield (request, attempt, choice, position, token, finish) of each row."""
        rows: Iterator[Any] = zip(*self._columns(), strict=True)
        return rows

    def select(self, rows: Sequence[int]) -> "TokenColumns":
        """Return the given rows as new columns."""
        ids, attempts, choices, positions, tokens, finishes = (
            [column[row] for row in rows] for column in self._columns()
        )
        kept = {new: self.logprobs[row] for new, row in enumerate(rows) if row in self.logprobs}
        return TokenColumns(ids, attempts, choices, positions, tokens, finishes, kept)

    def _columns(self) -> tuple[Sequence[int], ...]:
        ids = self.requests, self.attempts, self.choices
        return *ids, self.positions, self.tokens, self.finishes


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Logprobs of consecutive prompt tokens from a worker's step."""

    request: int
    attempt: int
    position: int  # prompt position of the first token
    logprobs: Sequence[object]  # `TokenLogprobs` messages of the tokens, passed on unchanged


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """Event: a client has sent a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class ClientDisconnected:
    """Event: a client has disconnected, or its call has ended early."""

    request: int


@dataclass(frozen=True, slots=True)
class ChoiceStopped:
    """Event: a stop string has matched, so that the choice ends after `length` answer tokens."""

    request: int
    choice: int
    length: int


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """Event: a stream to a worker is open, and its Welcome message has arrived."""

    info: WorkerInfo
    load: WorkerLoad = NO_LOAD


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """Event: the stream to a worker has ended, or the worker's process has exited."""

    worker: str


@dataclass(frozen=True, slots=True)
class Draining:
    """Event: a worker drains, so that its requests must move to other workers."""

    worker: str


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """Event: an operator has assigned a role, which replaces the role that the worker reports."""

    worker: str
    role: str  # prefill, decode or mixed


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Event: a message has arrived that only shows that the worker is alive."""

    worker: str


@dataclass(frozen=True, slots=True)
class Stepped:
    """Event: a worker has completed a step."""

    worker: str
    tokens: TokenColumns
    load: WorkerLoad | None = None
    ended: Sequence[tuple[int, int, str]] = ()  # failed requests: (request, attempt, reason)
    prompts: Sequence[ScoredPrompt] = ()
    # Cached prompt tokens of attempts: (request, attempt, tokens).
    cached: Sequence[tuple[int, int, int]] = ()
    preempted: Sequence[int] = ()  # for each preemption, the id of its request


@dataclass(frozen=True, slots=True)
class Yielded:
    """Event: a worker has stopped a request but keeps the KV of positions [0, `kv_len`)."""

    worker: str
    request: int
    attempt: int
    kv_len: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Event: a destination has reserved blocks and already has the KV of positions [0, `have`)."""

    worker: str
    request: int
    attempt: int
    epoch: int
    have: int
    endpoint: TransferEndpoint


@dataclass(frozen=True, slots=True)
class Received:
    """Event: the destination of a KV transfer has received all blocks."""

    worker: str
    request: int
    attempt: int
    epoch: int
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """Event: a KV transfer has failed. The destination then recomputes the tokens."""

    worker: str
    request: int
    attempt: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """Event: a worker rejects a request: the worker is full or, if `is_permanent`, too small."""

    worker: str
    request: int
    attempt: int
    reason: str
    is_permanent: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Event: a periodic clock tick, at which time limits are checked and requests may move."""


@dataclass(frozen=True, slots=True)
class AssignWaiting:
    """Event: queued requests are left to assign (see `Dispatcher.has_more_to_assign`)."""


WorkerMessage: TypeAlias = (
    Draining | Heartbeat | Stepped | Yielded | Ready | Received | Failed | Rejected
)
CacheEvent: TypeAlias = CacheEvents | CacheSnapshot
ClientEvent: TypeAlias = RequestArrived | ClientDisconnected | ChoiceStopped
RouterEvent: TypeAlias = RoleChanged | Tick | AssignWaiting
Event: TypeAlias = ClientEvent | WorkerUp | WorkerLost | WorkerMessage | CacheEvent | RouterEvent


# ------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class Source:
    """A lease at a worker, from which a destination can get the KV of positions [0, `kv_len`)."""

    worker: str
    incarnation: str
    attempt: int
    kv_len: int
    layout: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Command: run a request on a worker, which gets KV blocks from `source` if there is one."""

    worker: str
    request: Request
    attempt: int
    log: Sequence[Sequence[int]]  # tokens of the answers so far, one list per choice
    finished: Sequence[bool]  # for each choice, whether it has ended
    source: Source | None  # source of KV blocks, or None to compute all tokens
    yield_after: int  # new tokens after which the worker yields; 0 means never
    prompt_known: int = 1  # the router has the logprobs of prompt positions [1, prompt_known)


@dataclass(frozen=True, slots=True)
class Yield:
    """Command: stop a running request at the next step, and keep its blocks under a lease."""

    worker: str
    request: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Send:
    """Command: send the KV blocks of a lease, from position `have` on, to a destination."""

    worker: str
    request: int
    attempt: int  # attempt to which the lease belongs
    endpoint: TransferEndpoint
    to_attempt: int
    epoch: int
    have: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Command: release a request in any state, or only one of its choices, on a worker."""

    worker: str
    request: int
    attempt: int
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class Deliver:
    """Command: deliver new tokens to clients. Each choice gets each position once and in order."""

    tokens: TokenColumns


@dataclass(frozen=True, slots=True)
class DeliverEnd:
    """Command: end a choice with the finish reason LENGTH, without a new token."""

    request: int
    choice: int
    num_tokens: int  # number of tokens of the choice


@dataclass(frozen=True, slots=True)
class DeliverPrompt:
    """Command: deliver `num_cached`, or logprobs of the next prompt tokens (from token 1 on)."""

    request: int
    logprobs: Sequence[object] = ()
    # Number of prompt tokens that were in the prefix cache. It is delivered once, before any token.
    num_cached: int | None = None


@dataclass(frozen=True, slots=True)
class EndRequest:
    """Command: end a request for its client. Nothing is delivered for the request afterwards."""

    request: int
    status: Status
    message: str = ""
    retry_after: float | None = None  # seconds after which the client should retry


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Command: close the stream to a worker that is silent, stuck or sends wrong messages."""

    worker: str
    incarnation: str
    reason: str
    # Whether the worker must be replaced, because it is alive but completes no steps.
    stuck: bool = False


WorkerCommand: TypeAlias = Submit | Yield | Send | Drop | ResyncCache | ConnectPeers
ClientCommand: TypeAlias = Deliver | DeliverEnd | DeliverPrompt | EndRequest
Command: TypeAlias = WorkerCommand | ClientCommand | CloseStream
