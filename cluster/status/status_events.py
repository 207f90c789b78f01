"""Status events of a cluster, which the supervisor reports to a terminal or a log."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Scalar: TypeAlias = str | int | float | None


@dataclass(frozen=True, slots=True)
class Progress:
    """The present stage of a process, such as "loading libraries".

    While weights are loaded, `done` and `total` are numbers of bytes. In most other stages, both
    are 0.
    """

    stage: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A reminder that a stage takes long.

    `seconds` is the time in this stage so far. `detail` is, for example, the work that is left.
    """

    stage: str
    seconds: float
    detail: str = ""

    def __str__(self) -> str:
        left = f", {self.detail}" if self.detail else ""
        return f"{self.stage}{left}; {self.seconds:.0f} s so far"


@dataclass(frozen=True, slots=True)
class LogLine:
    """A log record, both as text for people and as an event with fields for machines."""

    text: str
    level: str = "warning"
    event: str = "log"
    fields: Mapping[str, Scalar] = field(default_factory=dict)
    at: float | None = None  # time of the record in seconds since 1970, or None for now


@dataclass(frozen=True, slots=True)
class Ready:
    """A process has begun to serve. Its start took `seconds`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Died:
    """A process died. It will be started again in `delay` seconds."""

    reason: str
    delay: float


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A process could not be started, so it was given up. It is tried again in `delay` seconds."""

    reason: str
    delay: float


@dataclass(frozen=True, slots=True)
class Serving:
    """The cluster is ready. All addresses are host:port."""

    http: str
    grpc: str
    admin: str  # address of the HTTP server for operators
    # For each router except the first, the addresses of its HTTP, gRPC and operators' ports.
    others: Sequence[tuple[str, str, str]] = ()


@dataclass(frozen=True, slots=True)
class Draining:
    """The cluster drains and has `seconds` left. The event is repeated until the drain ends."""

    seconds: float
    # Number of requests that have not ended, or None in the first event.
    requests: int | None = None

    def __str__(self) -> str:
        if self.requests is None:
            return f"draining: running requests have {self.seconds:g} s; Ctrl-C again stops at once"
        return f"draining: {self.requests} requests have not ended, {self.seconds:.0f} s are left"


@dataclass(frozen=True, slots=True)
class PoolResized:
    """The desired size of a pool changed. `text` has the old size, the new size and the reason."""

    pool: str
    text: str


@dataclass(frozen=True, slots=True)
class Stuck:
    """A router reports that a worker still responds but makes no progress."""

    worker: str
    # Address of the stuck process. A restarted worker keeps its name but not its address.
    address: str
    reason: str


@dataclass(frozen=True, slots=True)
class RoleAssigned:
    """An operator changed the role of a worker through the router that reports this event."""

    worker: str
    role: str
    at: float  # time of the change, in seconds since 1970
    by: str  # name of the API key that the operator used

    def __str__(self) -> str:
        return f"{self.worker} is now a {self.role} worker, set by {self.by}"


ProcessEvent: TypeAlias = Progress | LogLine | Stuck | RoleAssigned
"""The events that a router or worker sends to the supervisor."""

StatusEvent: TypeAlias = (
    ProcessEvent | Waiting | Ready | Died | GivenUp | Serving | Draining | PoolResized
)

Report: TypeAlias = Callable[[str, StatusEvent], None]
"""Function that receives the title of a process and an event of this process.

The title is "" for an event of the whole cluster.
"""
