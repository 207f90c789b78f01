"""Simulated network: latency, bandwidth, and message faults."""

from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from penstock.loadtests.simulator.world.clock import Act, Clock, Process

Way = tuple[str, str]
"""Sending and receiving process, by name."""

LATE_SECONDS = 0.05
"""A reordered message is delayed by this many seconds."""


class MessageFault(NamedTuple):
    """A fault of one message. The fault "late" sends a second copy `seconds` after the first."""

    how: str  # one of reorder, duplicate, late and corrupt
    seconds: float


NONE = MessageFault("", 0.0)


class Network:
    """The network paths between all processes.

    Args:
        clock: the virtual clock.
        latency: seconds from sending a message to its arrival.
        bandwidth: bytes per second of a path, for messages with KV blocks.
    """

    def __init__(self, clock: Clock, latency: float, bandwidth: float) -> None:
        self.clock = clock
        self.bandwidth = bandwidth
        self._latency = latency
        self._extra: dict[Way, float] = defaultdict(float)
        self._cut: dict[Way, float] = {}  # for each path, the time until which the path is cut
        self._message_faults: dict[Way, deque[MessageFault]] = defaultdict(deque)

    def latency(self, way: Way) -> float:
        return self._latency + self._extra[way]

    def delay(self, way: Way, seconds: float, until: float) -> None:
        """Add `seconds` of latency to a path until the time `until`."""
        self._extra[way] += seconds

        def over() -> None:
            self._extra[way] -= seconds

        self.clock.at(until, over)

    def cut(self, way: Way, until: float) -> None:
        """Cut a path until the time `until`. Messages that are sent meanwhile arrive at `until`."""
        self._cut[way] = max(until, self._cut.get(way, 0.0))

    def cut_until(self, way: Way) -> float:
        return self._cut.get(way, 0.0)

    def add_message_fault(self, way: Way, how: str, seconds: float) -> None:
        """Queue a fault for a path.

        Each later message on the path takes the oldest queued fault. Messages of `post`, and of
        pipes that are not faulty, take no fault.
        """
        self._message_faults[way].append(MessageFault(how, seconds))

    def take_message_fault(self, way: Way) -> "MessageFault":
        waiting = self._message_faults.get(way)
        return waiting.popleft() if waiting else NONE

    def post(self, way: Way, to: Process, act: Act, seconds: float = 0.0) -> None:
        """Send one unordered message that arrives after the latency plus `seconds`."""
        due = self.clock.now + self.latency(way) + seconds
        self.clock.at(due, lambda: self._arrive(way, to, act))

    def _arrive(self, way: Way, to: Process, act: Act) -> None:
        healed = self.cut_until(way)
        if healed > self.clock.now:
            self.clock.at(healed, lambda: self._arrive(way, to, act))
        else:
            to.take(act)


class Pipe:
    """One direction of a stream of numbered messages. A message out of order breaks the stream.

    Args:
        broken: called at the reader if the number of a message is not the expected one.
        faulty: whether the message faults of the path apply.
    """

    def __init__(
        self, network: Network, way: Way, to: Process, broken: Act, faulty: bool = True
    ) -> None:
        self._network = network
        self._way = way
        self._to = to
        self._broken = broken
        self._faulty = faulty
        self._due = 0.0
        self._num_sent = 0
        self._num_read = 0
        self.closed = False

    def arrival(self, sent: float) -> float:
        """Return the arrival time of a message sent at `sent`. Messages arrive in order."""
        return max(self._due, sent + self._network.latency(self._way))

    def send(self, act: Act, sent: float | None = None, disturbs: bool = True) -> None:
        """Send a message: run `act` at the reader when the message arrives.

        Args:
            sent: time at which the message was sent, if not now.
            disturbs: whether the message may change the reader's plans, so that its fast-forward
                must stop.
        """
        if self.closed:
            return
        network, number = self._network, self._num_sent
        self._num_sent += 1
        how = network.take_message_fault(self._way).how if self._faulty else ""
        self._due = self.arrival(network.clock.now if sent is None else sent)
        if disturbs:
            self._to.disturbed(self._due)
        late = LATE_SECONDS if how == "reorder" else 0.0
        for due in (self._due + late,) if how != "duplicate" else (self._due, self._due):
            network.clock.at(due, partial(self._arrive, number, act))

    def _arrive(self, number: int, act: Act) -> None:
        healed = self._network.cut_until(self._way)
        if healed > self._network.clock.now:
            self._network.clock.at(healed, lambda: self._arrive(number, act))
        else:
            self._to.take(partial(self._read, number, act))

    def is_next(self, number: int) -> bool:
        """Return True if `number` is the next message to read."""
        return number == self._num_read

    def _read(self, number: int, act: Act) -> None:
        if self.closed:
            return
        if not self.is_next(number):
            self._broken()
            return
        self._num_read += 1
        act()


class Stream:
    """One connection between a router and a worker. A new connection gets a new stream."""

    def __init__(
        self,
        network: Network,
        router: Process,
        worker: Process,
        router_broken: Callable[["Stream"], None],
        worker_broken: Callable[["Stream"], None],
    ) -> None:
        there, back = (router.name, worker.name), (worker.name, router.name)
        self.down = Pipe(network, there, worker, lambda: worker_broken(self))
        self.up = Pipe(network, back, router, lambda: router_broken(self))

    def close(self) -> None:
        """Close both directions. Messages that have not arrived are discarded."""
        self.down.closed = self.up.closed = True
