"""What a simulated worker is made of, and what it holds for each router's stream."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.common.worker_load import WorkerLoad
from penstock.loadtests.simulate.clock import Act
from penstock.loadtests.simulate.handover import Name, Outgoing, Pace
from penstock.loadtests.simulate.network import Stream
from penstock.router.routing.events import Event, WorkerInfo
from penstock.workers.scheduling.config import SchedulerConfig


class Key(NamedTuple):
    """A sequence's name: `session` numbers the routers' streams."""

    session: int
    request: int
    attempt: int


@dataclass(slots=True)
class Held:
    source: Name | None = None
    epoch: int = 0
    kv_len: int = 0
    sends: list[Outgoing] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Session:
    """One router's stream."""

    number: int
    router: str
    stream: Stream
    tell: Callable[[Event], None]  # at the router
    ended: Act  # at the router
    heard: float
    told: float  # when something was last said
    loaded: float = 0.0  # when it was last told how full the worker is
    load: WorkerLoad | None = None  # as it was last told
    held: dict[Key, Held] = field(default_factory=dict)

    def put(self, event: Event, now: float) -> None:
        """Say it to the router; `now` may be a moment ago."""
        self.told = now
        tell = self.tell
        self.stream.up.send(lambda: tell(event), sent=now)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a worker is made of."""

    info: WorkerInfo
    limits: SchedulerConfig
    bytes_per_block: int = 1 << 20
    pace: Pace = field(default_factory=Pace)
