"""Status events of a cluster, reported by the supervisor to a terminal or a log."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Scalar: TypeAlias = str | int | float | None


@dataclass(frozen=True, slots=True)
class Progress:
    """Current stage of a process; `done` and `total` are bytes of weights, or 0 in most stages."""

    stage: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A reminder that a stage takes long: its seconds so far, and a detail such as what is left."""

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
    at: float | None = None  # seconds since 1970; None: now


@dataclass(frozen=True, slots=True)
class Ready:
    """A process serves, `seconds` after its start began."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Died:
    """A process died; it is started again in `delay` seconds."""

    reason: str
    delay: float


@dataclass(frozen=True, slots=True)
class GivenUp:
    """A process failed to start too often; the next try is in `delay` seconds."""

    reason: str
    delay: float


@dataclass(frozen=True, slots=True)
class Serving:
    """The cluster is ready; the addresses are host:port."""

    http: str
    grpc: str
    admin: str  # HTTP, for operators
    others: Sequence[tuple[str, str, str]] = ()  # (http, grpc, admin) of each other router


@dataclass(frozen=True, slots=True)
class Draining:
    """The cluster drains and has `seconds` left; reported repeatedly."""

    seconds: float
    requests: int | None = None  # number of unfinished requests; None in the first report

    def __str__(self) -> str:
        if self.requests is None:
            return f"draining: running requests have {self.seconds:g} s; Ctrl-C again stops at once"
        return f"draining: {self.requests} requests have not ended, {self.seconds:.0f} s are left"


@dataclass(frozen=True, slots=True)
class PoolResized:
    """The desired size of a pool changed; `text` has the old and new size and the reason."""

    pool: str
    text: str


@dataclass(frozen=True, slots=True)
class Stuck:
    """A router reports that a worker responds but makes no progress."""

    worker: str
    address: str  # identifies the process, because a restarted worker keeps its name
    reason: str


@dataclass(frozen=True, slots=True)
class RoleAssigned:
    """An operator changed a worker's role through the router that reports this event."""

    worker: str
    role: str
    at: float  # seconds since 1970
    by: str  # name of the operator's API key

    def __str__(self) -> str:
        return f"{self.worker} is now a {self.role} worker, set by {self.by}"


ProcessEvent: TypeAlias = Progress | LogLine | Stuck | RoleAssigned
"""Events that a process itself reports."""

StatusEvent: TypeAlias = (
    ProcessEvent | Waiting | Ready | Died | GivenUp | Serving | Draining | PoolResized
)

Report: TypeAlias = Callable[[str, StatusEvent], None]
"""Function called with the title of a process ("" for the whole cluster) and its event."""
