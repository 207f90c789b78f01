"""What a supervisor tells of its cluster, for a person or a log to show."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Scalar: TypeAlias = str | int | float | None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a start has come; the numbers are bytes of weights, 0 of 0 where there are none."""

    stage: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """A stage that takes long goes on: for how many seconds so far, and what is left if known."""

    stage: str
    seconds: float
    detail: str = ""

    def __str__(self) -> str:
        left = f", {self.detail}" if self.detail else ""
        return f"{self.stage}{left}; {self.seconds:.0f} s so far"


@dataclass(frozen=True, slots=True)
class LogLine:
    """What a process logs: as a text for people, and as an event with what there is to say."""

    text: str
    level: str = "warning"
    event: str = "log"
    fields: Mapping[str, Scalar] = field(default_factory=dict)
    at: float | None = None  # seconds since 1970; None: now


@dataclass(frozen=True, slots=True)
class Ready:
    """It serves, `seconds` after its start began."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Died:
    """It will be started again in `delay` seconds."""

    reason: str
    delay: float


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Its starts keep failing: its place may be filled again in `delay` seconds."""

    reason: str
    delay: float


@dataclass(frozen=True, slots=True)
class Serving:
    """Everything is ready; the addresses are host:port."""

    http: str
    grpc: str
    others: Sequence[tuple[str, str]] = ()  # the same of the routers after the first


@dataclass(frozen=True, slots=True)
class Draining:
    """Nothing new is taken; what runs has so many seconds, told again as they pass."""

    seconds: float
    requests: int | None = None  # that have not ended; None: it begins

    def __str__(self) -> str:
        if self.requests is None:
            return f"draining: what runs has {self.seconds:g} s; Ctrl-C again ends it at once"
        return f"draining: {self.requests} requests have not ended, {self.seconds:.0f} s are left"


@dataclass(frozen=True, slots=True)
class PoolResized:
    """A pool is to have another number of workers; the text says from how many to how many, why."""

    pool: str
    text: str


@dataclass(frozen=True, slots=True)
class Stuck:
    """A router says of a worker: it answers, but does not get on."""

    worker: str
    address: str  # of the process that is meant: another one may have its name by now
    reason: str


@dataclass(frozen=True, slots=True)
class RoleAssigned:
    """An operator gave a worker a role, by a request to the router that reports it."""

    worker: str
    role: str
    at: float  # seconds since 1970

    def __str__(self) -> str:
        return f"{self.worker} is a {self.role} worker now, by an operator"


ProcessEvent: TypeAlias = Progress | LogLine | Stuck | RoleAssigned
"""What a process tells of itself."""

StatusEvent: TypeAlias = (
    ProcessEvent | Waiting | Ready | Died | GivenUp | Serving | Draining | PoolResized
)

Report: TypeAlias = Callable[[str, StatusEvent], None]
"""Takes the title of the process that a notice is about ("" for the whole cluster)."""
