"""Inputs (events) and outputs (commands) of the dispatcher, as plain records.

The frontend and the worker links convert messages and clock ticks to events and execute the
commands. `docs/lifecycle.md` is the specification.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple, TypeAlias

from penstock.common.sampling_params import SamplingParams
from penstock.common.worker_load import NO_LOAD, WorkerLoad


class Finish(IntEnum):
    """Why a choice ended; the values are those of worker.proto."""

    NONE = 0
    STOP = 1
    LENGTH = 2


class Status(Enum):
    """How a request ends."""

    OK = "ok"
    CANCELLED = "cancelled"  # the client has disconnected; no error is sent
    DEADLINE = "deadline"
    INVALID = "invalid"  # it can never fit on any worker
    OVERLOADED = "overloaded"  # the queue is full; the client may retry after `retry_after`
    UNAVAILABLE = "unavailable"  # no worker is connected
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request, validated and tokenized."""

    id: int
    prompt: Sequence[int]
    params: SamplingParams  # as workers get them, see `SamplingParams.for_worker`
    num_choices: int = 1
    num_beams: int = 0  # width of the beam search; 0: tokens are sampled
    max_tokens: int = 16
    tenant: str = ""
    priority: int = 0
    salt: bytes = b""
    deadline: float = float("inf")  # clock time, as `now`
    log: Sequence[Sequence[int]] = ()  # tokens that the client has, one list per choice
    ended: Sequence[bool] = ()  # per choice: it had ended in an earlier call
    external_id: str = ""

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
    layout: str  # two workers can exchange KV blocks only if equal
    block_size: int
    num_blocks: int
    max_model_len: int
    max_sequences: int
    step_bounds: tuple[float, ...] = ()  # buckets of `WorkerLoad.step_counts`, in seconds


@dataclass(frozen=True, slots=True)
class TransferEndpoint:
    """Address and secret with which a source connects to a destination, which creates them."""

    worker: str
    incarnation: str
    address: str
    secret: str


class NewToken(NamedTuple):
    """One generated token of a worker's step. A tuple for speed: one is built per token."""

    request: int
    attempt: int
    choice: int
    position: int  # token index in the answer, from 0
    token: int
    finish: Finish = Finish.NONE
    logprobs: object = None  # a `TokenLogprobs` message, passed through


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Logprobs of consecutive prompt tokens from a worker's step."""

    request: int
    attempt: int
    position: int  # of the first token, in the prompt
    logprobs: Sequence[object]  # `TokenLogprobs` messages, passed through


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
    """The stream has ended, or the worker's process is known to have exited."""

    worker: str


@dataclass(frozen=True, slots=True)
class Draining:
    """The worker drains: its requests must move to other workers."""

    worker: str


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """An operator gives a worker a role, which overrides the role that it reports."""

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
    tokens: Sequence[NewToken]
    load: WorkerLoad | None = None
    ended: Sequence[tuple[int, int, str]] = ()  # failed: (request, attempt, reason)
    prompts: Sequence[ScoredPrompt] = ()


@dataclass(frozen=True, slots=True)
class Yielded:
    """A worker has stopped a request and keeps the KV blocks of positions [0, `kv_len`)."""

    worker: str
    request: int
    attempt: int
    kv_len: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A destination has reserved blocks; it already holds positions [0, `have`)."""

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
    """A worker does not take a request: it is full, or (`is_permanent`) too small for it."""

    worker: str
    request: int
    attempt: int
    reason: str
    is_permanent: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Periodic event: deadlines, worker timeouts and throttled re-placements are checked."""


Event: TypeAlias = (
    RequestArrived
    | ClientDisconnected
    | ChoiceStopped
    | WorkerUp
    | WorkerLost
    | Draining
    | RoleChanged
    | Heartbeat
    | Stepped
    | Yielded
    | Ready
    | Received
    | Failed
    | Rejected
    | Tick
)


# ------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class Source:
    """A lease at a worker, from which a destination can receive positions [0, `kv_len`)."""

    worker: str
    incarnation: str
    attempt: int
    kv_len: int
    layout: str


@dataclass(frozen=True, slots=True)
class Submit:
    """Run a request on a worker, with everything that it needs to compute from the tokens."""

    worker: str
    request: Request
    attempt: int
    log: Sequence[Sequence[int]]  # tokens so far, one list per choice
    finished: Sequence[bool]  # per choice: it has ended
    source: Source | None  # None: compute everything
    yield_after: int  # new tokens before the worker yields; 0: never
    prompt_known: int = 1  # logprobs of prompt positions below it are known, if requested


@dataclass(frozen=True, slots=True)
class Yield:
    """Stop a running request at the next step and keep its blocks under a lease."""

    worker: str
    request: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Send:
    """Send the blocks of a lease, from position `have` on, to a destination."""

    worker: str
    request: int
    attempt: int  # of the lease
    endpoint: TransferEndpoint
    to_attempt: int
    epoch: int
    have: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Release a request, or one choice of it, in whatever state the worker holds it."""

    worker: str
    request: int
    attempt: int
    choice: int | None = None


class Deliver(NamedTuple):
    """New tokens for the client: each position of each choice once and in order."""

    request: int
    choice: int
    position: int  # token index of the first token
    tokens: Sequence[int]
    logprobs: Sequence[object]
    finish: Finish


@dataclass(frozen=True, slots=True)
class DeliverPrompt:
    """Logprobs of the next prompt tokens: each position once and in order, from position 1."""

    request: int
    logprobs: Sequence[object]


@dataclass(frozen=True, slots=True)
class EndRequest:
    """The request has ended; nothing is delivered for it afterwards."""

    request: int
    status: Status
    message: str = ""
    retry_after: float | None = None  # seconds


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Close the stream to a worker that is silent, stuck or sends inconsistent messages."""

    worker: str
    incarnation: str
    reason: str
    stuck: bool = False  # it is alive but completes no steps: the supervisor must replace it


Command: TypeAlias = (
    Submit | Yield | Send | Drop | Deliver | DeliverPrompt | EndRequest | CloseStream
)
