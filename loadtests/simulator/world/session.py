"""Settings of a simulated worker, and the worker's state for each router's stream."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from penstock.common.worker_load import WorkerLoad
from penstock.loadtests.simulator.world.clock import Act
from penstock.loadtests.simulator.world.network import Stream
from penstock.loadtests.simulator.world.rank_pairs import TransferTiming
from penstock.router.routing.events import WorkerInfo
from penstock.workers.kv_transfer.protocol.messages import WorkerId
from penstock.workers.kv_transfer.protocol.send import OutgoingTransfer
from penstock.workers.scheduling.config import SchedulerConfig


class Key(NamedTuple):
    """Key of a sequence. `session` is the number of the session."""

    session: int
    request: int
    attempt: int


@dataclass(slots=True)
class HeldSequence:
    """A sequence that a worker holds for a router. It is queued, running or under a lease."""

    source: WorkerId | None = None
    epoch: int = 0  # epoch of the incoming transfer; 0 without a transfer
    kv_len: int = 0  # number of positions under a lease; 0 without a lease
    sends: list[OutgoingTransfer] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Session:
    """A worker's end of the stream of one router."""

    number: int
    router: str
    stream: Stream
    deliver: Callable[[Any], None]  # runs at the router when an event arrives
    ended: Act  # runs at the router when the stream ends
    last_received_at: float
    last_sent_at: float  # time at which the last event was sent
    load_sent_at: float = 0.0  # time at which the load was last sent
    load: WorkerLoad | None = None  # the load that was last sent
    held: dict[Key, HeldSequence] = field(default_factory=dict)
    # cached prompt tokens of the sequences that were admitted since the last step message
    num_cached: dict[Key, int] = field(default_factory=dict)

    def take_cached(self) -> list[tuple[int, int, int]]:
        """Return (request, attempt, cached tokens) of sequences admitted since the last call."""
        counts, self.num_cached = self.num_cached, {}
        return [(key.request, key.attempt, count) for key, count in counts.items()]

    def send(self, event: object, now: float) -> None:
        """Send an event or `SteppedRuns` to the router at `now`, which may be in the past."""
        self.last_sent_at = now
        self.stream.up.send(partial(self.deliver, event), sent=now)


@dataclass(frozen=True, slots=True)
class WorkerShape:
    """Settings of a worker."""

    info: WorkerInfo
    limits: SchedulerConfig
    bytes_per_block: int = 1 << 20
    transfer_timing: TransferTiming = field(default_factory=TransferTiming)
