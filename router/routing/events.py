"""What the deciding part of the router is told (events) and what it answers (commands).

Both are plain records: the shell makes events out of wire messages and the clock, and carries the
commands out. `docs/lifecycle.md` is the specification.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple, TypeAlias

from penstock.common.sampling_params import SamplingParams
from penstock.common.worker_load import NO_LOAD, WorkerLoad


class Finish(IntEnum):
    """Why a choice ended; the numbers are those of the wire."""

    NONE = 0
    STOP = 1
    LENGTH = 2


class Status(Enum):
    """How a request ends."""

    OK = "ok"
    CANCELLED = "cancelled"  # its client is gone: nobody is told
    DEADLINE = "deadline"
    INVALID = "invalid"  # no worker could ever run it
    OVERLOADED = "overloaded"  # a queue is full: come back after `retry_after`
    UNAVAILABLE = "unavailable"  # no worker is there
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Request:
    """What a client asked, validated and tokenized."""

    id: int
    prompt: Sequence[int]
    params: SamplingParams  # as workers need them
    num_choices: int = 1
    num_beams: int = 0  # of the search that gives the choices; 0: they are drawn
    max_tokens: int = 16
    tenant: str = ""
    priority: int = 0
    salt: bytes = b""
    deadline: float = float("inf")  # on the clock of `now`
    log: Sequence[Sequence[int]] = ()  # tokens that the client already has, a list a choice
    ended: Sequence[bool] = ()  # which of these choices the client saw end
    external_id: str = ""

    @property
    def num_sequences(self) -> int:
        """That run at a time on a worker."""
        return self.num_beams or self.num_choices


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker is; fixed for one incarnation."""

    worker: str
    incarnation: str
    role: str  # prefill, decode or mixed
    layout: str  # workers exchange blocks only where their layouts agree
    block_size: int
    num_blocks: int
    max_model_len: int
    max_sequences: int
    step_bounds: tuple[float, ...] = ()  # of its histogram of steps: see `WorkerLoad.step_counts`


@dataclass(frozen=True, slots=True)
class TransferEndpoint:
    """Where and with which secret a source finds a destination: minted there, carried here."""

    worker: str
    incarnation: str
    address: str
    secret: str


class NewToken(NamedTuple):
    """One generated token, as a worker's step tells it. A tuple, like `Deliver`: one a token."""

    request: int
    attempt: int
    choice: int
    position: int  # in the answer, from 0
    token: int
    finish: Finish = Finish.NONE
    logprobs: object = None  # in the wire's form: carried, never read


@dataclass(frozen=True, slots=True)
class ScoredPrompt:
    """Logprobs of consecutive prompt tokens, as a worker's step tells them."""

    request: int
    attempt: int
    position: int  # of the first, in the prompt
    logprobs: Sequence[object]  # in the wire's form: carried, never read


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class RequestArrived:
    request: Request


@dataclass(frozen=True, slots=True)
class ClientDisconnected:
    """The client went away."""

    request: int


@dataclass(frozen=True, slots=True)
class ChoiceStopped:
    """A stop string matched: the choice ends after `length` tokens of its answer."""

    request: int
    choice: int
    length: int


@dataclass(frozen=True, slots=True)
class WorkerUp:
    """A stream to a worker is open and it has introduced itself."""

    info: WorkerInfo
    load: WorkerLoad = NO_LOAD


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The stream broke, or the worker is known to be dead."""

    worker: str


@dataclass(frozen=True, slots=True)
class Draining:
    worker: str


@dataclass(frozen=True, slots=True)
class RoleChanged:
    """Somebody who may say so gives a worker another role, whatever it says of itself."""

    worker: str
    role: str  # prefill, decode or mixed


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A beat: nothing but a sign of life."""

    worker: str


@dataclass(frozen=True, slots=True)
class Stepped:
    worker: str
    tokens: Sequence[NewToken]
    load: WorkerLoad | None = None
    ended: Sequence[tuple[int, int, str]] = ()  # (request, attempt, reason): given up by the worker
    prompts: Sequence[ScoredPrompt] = ()


@dataclass(frozen=True, slots=True)
class Yielded:
    worker: str
    request: int
    attempt: int
    kv_len: int


@dataclass(frozen=True, slots=True)
class Ready:
    worker: str
    request: int
    attempt: int
    epoch: int
    have: int
    endpoint: TransferEndpoint


@dataclass(frozen=True, slots=True)
class Received:
    worker: str
    request: int
    attempt: int
    epoch: int
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    worker: str
    request: int
    attempt: int
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    worker: str
    request: int
    attempt: int
    reason: str
    is_permanent: bool = False


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: deadlines, silences and paced re-placements are looked at."""


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
    worker: str
    incarnation: str
    attempt: int
    kv_len: int
    layout: str


@dataclass(frozen=True, slots=True)
class Submit:
    worker: str
    request: Request
    attempt: int
    log: Sequence[Sequence[int]]  # answers so far, a list a choice
    finished: Sequence[bool]  # which choices have ended
    source: Source | None
    yield_after: int
    prompt_known: int = 1  # prompt positions below it have their logprobs, where they are wanted


@dataclass(frozen=True, slots=True)
class Yield:
    worker: str
    request: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Send:
    worker: str
    request: int
    attempt: int  # of the lease
    endpoint: TransferEndpoint
    to_attempt: int
    epoch: int
    have: int


@dataclass(frozen=True, slots=True)
class Drop:
    worker: str
    request: int
    attempt: int
    choice: int | None = None


class Deliver(NamedTuple):
    """New tokens for the client: each position of each choice exactly once, in order."""

    request: int
    choice: int
    position: int  # of the first
    tokens: Sequence[int]
    logprobs: Sequence[object]
    finish: Finish


@dataclass(frozen=True, slots=True)
class DeliverPrompt:
    """Logprobs of the next prompt tokens: each position once, in order, from the second on."""

    request: int
    logprobs: Sequence[object]


@dataclass(frozen=True, slots=True)
class EndRequest:
    """The request is over; the last thing that is ever said of it."""

    request: int
    status: Status
    message: str = ""
    retry_after: float | None = None  # seconds


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Close the stream to that worker: it is silent, or what it says makes no sense."""

    worker: str
    incarnation: str
    reason: str
    stuck: bool = False  # it answers and does not get on: whoever keeps it alive must replace it


Command: TypeAlias = (
    Submit | Yield | Send | Drop | Deliver | DeliverPrompt | EndRequest | CloseStream
)
