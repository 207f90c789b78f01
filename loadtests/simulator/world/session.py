"""What a simulated worker is made of, and what it holds for each router's stream."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.common.worker_load import WorkerLoad
from penstock.loadtests.simulator.world.clock import Act
from penstock.loadtests.simulator.world.network import Stream
from penstock.loadtests.simulator.world.transfer_endpoints import (
    OutgoingTransfer,
    TransferTiming,
    WorkerId,
)
from penstock.router.routing.events import Event, WorkerInfo
from penstock.workers.scheduling.config import SchedulerConfig


class Key(NamedTuple):
    """A sequence's name: `session` numbers the routers' streams."""

    session: int
    request: int
    attempt: int


@dataclass(slots=True)
class HeldSequence:
    source: WorkerId | None = None
    epoch: int = 0
    kv_len: int = 0
    sends: list[OutgoingTransfer] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Session:
    """One router's stream."""

    number: int
    router: str
    stream: Stream
    deliver: Callable[[Event], None]  # at the router
    ended: Act  # at the router
    last_received_at: float
    last_sent_at: float  # when something was last said
    load_sent_at: float = 0.0  # when it was last told how full the worker is
    load: WorkerLoad | None = None  # as it was last told
    held: dict[Key, HeldSequence] = field(default_factory=dict)

    def send(self, event: Event, now: float) -> None:
        """Say it to the router; `now` may be a moment ago."""
        self.last_sent_at = now
        deliver = self.deliver
        self.stream.up.send(lambda: deliver(event), sent=now)


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """What a worker is made of."""

    info: WorkerInfo
    limits: SchedulerConfig
    bytes_per_block: int = 1 << 20
    transfer_timing: TransferTiming = field(default_factory=TransferTiming)
