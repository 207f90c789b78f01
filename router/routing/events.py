"""Inputs (events) and outputs (commands) of the dispatcher, as plain records.

The frontend and the worker links convert messages and clock ticks to events and execute the
commands. `docs/lifecycle.md` is the specification.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TypeAlias

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
    CANCELLED = "cancelled"  # the client has disconnected; no error is sent
    DEADLINE = "deadline"
    INVALID = "invalid"  # the request can never fit on any worker
    OVERLOADED = "overloaded"  # no room in the queue; the client may retry after `retry_after`
    UNAVAILABLE = "unavailable"  # no worker is connected
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request, validated and tokenized."""

    id: int
    prompt: Sequence[int]
    params: SamplingParams  # in the form for workers: see `SamplingParams.for_worker`
    num_choices: int = 1
    num_beams: int = 0  # number of beams; 0: no beam search
    max_tokens: int = 16
    tenant: str = ""
    priority: int = 0  # as in vLLM: lower goes first; orders the requests of one tenant only
    salt: bytes = b""
    deadline: float = float("inf")  # seconds on the dispatcher's clock
    log: Sequence[Sequence[int]] = ()  # tokens that the client already has, one list per choice
    ended: Sequence[bool] = ()  # per choice: whether it ended in an earlier call
    external_id: str = ""
    # By block size: the short hashes of the prompt's full blocks, see `common.block_hash`.
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
    machine: str = ""  # workers with the same value share the cores of a machine; "": shares none
    transfer: TransferEndpoint | None = None  # where other workers send KV; None: not reported


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """New tokens of a step as columns: row i of each column describes token i.

    The columns travel unchanged from the worker's message to the detokenizers.
    """

    requests: Sequence[int] = ()
    attempts: Sequence[int] = ()
    choices: Sequence[int] = ()
    positions: Sequence[int] = ()  # token index in the answer, from 0
    tokens: Sequence[int] = ()
    finishes: Sequence[int] = ()  # values of `Finish`
    logprobs: Mapping[int, object] = field(default_factory=dict)  # `TokenLogprobs` by row, if any

    def __len__(self) -> int:
        return len(self.tokens)

    def rows(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        """Yield (request, attempt, choice, position, token, finish) of each row."""
        return zip(
            self.requests,
            self.attempts,
            self.choices,
            self.positions,
            self.tokens,
            self.finishes,
            strict=True,
        )

    def select(self, rows: Sequence[int]) -> "TokenColumns":
        """Return the given rows as new columns."""
        return TokenColumns(
            [self.requests[row] for row in rows],
            [self.attempts[row] for row in rows],
            [self.choices[row] for row in rows],
            [self.positions[row] for row in rows],
            [self.tokens[row] for row in rows],
            [self.finishes[row] for row in rows],
            {new: self.logprobs[row] for new, row in enumerate(rows) if row in self.logprobs},
        )


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Logprobs of consecutive prompt tokens from a worker's step."""

    request: int
    attempt: int
    position: int  # prompt position of the first token
    logprobs: Sequence[object]  # `TokenLogprobs` messages, passed on unchanged


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class RequestArrived:
    """A client has sent a request."""

    request: Request


@dataclass(frozen=True, slots=True)
class ClientDisconnected:
    """The client has disconnected, or its call has ended early."""

    request: int


@dataclass(frozen=True, slots=True)
class ChoiceStopped:
    """A stop string matched: the choice ends after `length` tokens of its answer."""

    request: int
    choice: int
    length: int


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A stream to a worker is open and its Welcome message has arrived."""

    info: WorkerInfo
    load: WorkerLoad = NO_LOAD


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The stream to a worker has ended, or the worker's process is known to have exited."""

    worker: str


@dataclass(frozen=True, slots=True)
class Draining:
    """A worker drains: its requests must move to other workers."""

    worker: str


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """An operator has assigned a role to a worker, which replaces the role that it reports."""

    worker: str
    role: str  # prefill, decode or mixed


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A message that only shows that the worker is alive."""

    worker: str


@dataclass(frozen=True, slots=True)
class Stepped:
    """A worker has completed a step."""

    worker: str
    tokens: TokenColumns
    load: WorkerLoad | None = None
    ended: Sequence[tuple[int, int, str]] = ()  # failed requests: (request, attempt, reason)
    prompts: Sequence[ScoredPrompt] = ()
    cached: Sequence[tuple[int, int, int]] = ()  # (request, attempt, cached prompt tokens)


@dataclass(frozen=True, slots=True)
class Yielded:
    """A worker has stopped a request and keeps the KV blocks of positions [0, `kv_len`)."""

    worker: str
    request: int
    attempt: int
    kv_len: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A destination has reserved blocks, and already has the KV of positions [0, `have`)."""

    worker: str
    request: int
    attempt: int
    epoch: int
    have: int
    endpoint: TransferEndpoint


@dataclass(frozen=True, slots=True)
class Received:
    """A destination has received all KV blocks of a transfer."""

    worker: str
    request: int
    attempt: int
    epoch: int
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """A KV transfer has failed; the tokens are recomputed at the destination."""

    worker: str
    request: int
    attempt: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A worker rejects a request: the worker is full or, if `is_permanent`, too small."""

    worker: str
    request: int
    attempt: int
    reason: str
    is_permanent: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """A periodic event: the dispatcher checks deadlines and worker timeouts, and moves requests."""


WorkerMessage: TypeAlias = (
    Draining | Heartbeat | Stepped | Yielded | Ready | Received | Failed | Rejected
)
CacheEvent: TypeAlias = CacheEvents | CacheSnapshot
ClientEvent: TypeAlias = RequestArrived | ClientDisconnected | ChoiceStopped
Event: TypeAlias = (
    ClientEvent | WorkerUp | WorkerLost | WorkerMessage | CacheEvent | RoleChanged | Tick
)


# ------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class Source:
    """A lease at a worker, from which a destination can receive KV of positions [0, `kv_len`)."""

    worker: str
    incarnation: str
    attempt: int
    kv_len: int
    layout: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Run a request on a worker. The tokens are sufficient; a source only saves computation."""

    worker: str
    request: Request
    attempt: int
    log: Sequence[Sequence[int]]  # tokens so far, one list per choice
    finished: Sequence[bool]  # per choice: whether it has ended
    source: Source | None  # None: compute all tokens
    yield_after: int  # the worker yields after this many new tokens; 0: never
    prompt_known: int = 1  # logprobs of prompt positions [1, prompt_known) are known


@dataclass(frozen=True, slots=True)
class Yield:
    """Stop a running request at the next step and keep its blocks under a lease."""

    worker: str
    request: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send the KV blocks of a lease, from position `have` on, to a destination."""

    worker: str
    request: int
    attempt: int  # attempt of the lease
    endpoint: TransferEndpoint
    to_attempt: int
    epoch: int
    have: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Release a request, or one of its choices, on a worker, in any state."""

    worker: str
    request: int
    attempt: int
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class Deliver:
    """New tokens for clients; each position of each choice is delivered once and in order."""

    tokens: TokenColumns


@dataclass(frozen=True, slots=True)
class DeliverEnd:
    """End a choice with finish reason LENGTH, without a new token."""

    request: int
    choice: int
    num_tokens: int  # number of tokens of the choice


@dataclass(frozen=True, slots=True)
class DeliverPrompt:
    """Data about the prompt: logprobs of its next tokens (from token 1 on), or `num_cached`."""

    request: int
    logprobs: Sequence[object] = ()
    num_cached: int | None = None  # prompt tokens in the prefix cache; once, before any token


@dataclass(frozen=True, slots=True)
class EndRequest:
    """End a request for its client; nothing is delivered for the request afterwards."""

    request: int
    status: Status
    message: str = ""
    retry_after: float | None = None  # seconds after which the client should retry


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Close the stream to a worker that is silent, stuck or sends inconsistent messages."""

    worker: str
    incarnation: str
    reason: str
    stuck: bool = False  # the worker is alive but completes no steps, and must be replaced


WorkerCommand: TypeAlias = Submit | Yield | Send | Drop | ResyncCache | ConnectPeers
ClientCommand: TypeAlias = Deliver | DeliverEnd | DeliverPrompt | EndRequest
Command: TypeAlias = WorkerCommand | ClientCommand | CloseStream
