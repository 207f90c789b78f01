"""A simulated router: the production dispatcher with links to workers in virtual time."""

from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Protocol

import numpy as np

from penstock.common.block_hash import root_hash, short_prefix_hashes
from penstock.loadtests.simulator.world.clock import Process
from penstock.loadtests.simulator.world.network import Network, Stream
from penstock.loadtests.simulator.world.session import Session
from penstock.loadtests.simulator.world.token_runs import RunClient, SteppedRuns, append_runs
from penstock.loadtests.simulator.world.worker import HEARTBEAT_SECONDS, Worker
from penstock.router.routing import events as ev
from penstock.router.routing.dispatcher import Dispatcher, DispatcherLimits
from penstock.router.routing.placement.policy import Policy
from penstock.router.routing.prefix_cache.cache_events import ResyncCache

TICK_SECONDS = 0.5
CONNECT_SECONDS = 10.0
PAUSE_SECONDS = 0.2
"""Seconds between attempts to connect."""


class Client(Protocol):
    """Interface of the client of a request."""

    def deliver(self, choice: int, position: int, token: int, finish: int) -> int | None:
        """Take a new token. Return the length of the answer if a stop string ends the choice."""
        ...

    def deliver_end(self, end: ev.DeliverEnd) -> None:
        """Handle the end of a choice that comes without a new token."""

    def deliver_cached(self, num_tokens: int) -> None:
        """Take the number of cached prompt tokens."""

    def on_choice_stopped(self, choice: int) -> None:
        """Record that the router has processed the cut of `choice`."""

    def end(self, end: ev.EndRequest) -> None: ...


class Link:
    """A router's link to one worker. When its stream is lost, the link opens a new stream."""

    def __init__(
        self,
        router: "Router",
        worker: str,
        network: Network,
        find: Callable[[str], Worker | None],
    ) -> None:
        self._router = router
        self._worker = worker
        self._network = network
        self._find = find
        self._stream: Stream | None = None
        # The session at the worker, or None until the link is connected.
        self._session: Session | None = None
        self._worker_process: Worker | None = None
        self._last_sent_at = 0.0
        self._wanted = True
        self._connect()

    def send(self, command: ev.WorkerCommand | None) -> None:
        """Send a command, or a heartbeat if it is None. Does nothing while not connected."""
        stream, session, worker = self._stream, self._session, self._worker_process
        if stream is None or session is None or worker is None:
            return
        self._last_sent_at = self._router.process.clock.now
        stream.down.send(lambda: worker.handle(session, command), disturbs=command is not None)

    def close(self) -> None:
        """Close the stream. The link reconnects after a pause."""
        stream, session, worker = self._stream, self._session, self._worker_process
        if stream is None:
            return
        stream.up.closed = True
        if session is not None and worker is not None:
            stream.down.send(lambda: worker.close(session))
        self._on_closed(stream)

    def stop(self) -> None:
        """Close the stream and do not reconnect."""
        self._wanted = False
        self.close()

    def _connect(self) -> None:
        router, worker = self._router, self._find(self._worker)
        if not self._wanted or self._stream is not None:
            return
        if worker is None:
            router.process.after(PAUSE_SECONDS, self._connect)
            return
        self._worker_process = worker
        stream = Stream(
            self._network,
            router.process,
            worker.process,
            lambda _: self.close(),
            self._worker_broken,
        )
        self._stream = stream
        stream.down.send(lambda: self._attach(stream, worker))
        router.process.after(CONNECT_SECONDS, lambda: self._give_up(stream))

    def _attach(self, stream: Stream, worker: Worker) -> None:
        """Open the session at the worker, and send the worker's load to the router."""
        session = worker.attach(
            self._router.name,
            stream,
            partial(self._on_event, stream),
            lambda: self._on_closed(stream),
        )
        if self._router.hash_key:
            worker.cache_stream.open(session)
        info, load = worker.info, worker.load
        stream.up.send(lambda: self._welcome(stream, session, ev.WorkerUp(info, load)))

    def _worker_broken(self, stream: Stream) -> None:
        """Close the session at the worker, because a message of the stream is missing."""
        worker = self._worker_process
        for session in list(worker.sessions.values()) if worker else ():
            if session.stream is stream and worker is not None:
                worker.close_stream(session)

    def _welcome(self, stream: Stream, session: Session, up: ev.WorkerUp) -> None:
        if stream is not self._stream:
            return
        self._session = session
        self._last_sent_at = self._router.process.clock.now
        self._router.block_sizes.add(up.info.block_size)
        self._router.post(up)
        if self._router.heartbeats:
            self._router.process.after(HEARTBEAT_SECONDS, lambda: self._heartbeat(stream))

    def _on_event(self, stream: Stream, event: ev.Event | SteppedRuns) -> None:
        if stream is self._stream and self._session is not None:
            self._router.post(self._router.append_runs(event))

    def _heartbeat(self, stream: Stream) -> None:
        if stream is not self._stream:
            return
        if self._router.process.clock.now - self._last_sent_at >= HEARTBEAT_SECONDS * 0.99:
            self.send(None)
        self._router.process.after(HEARTBEAT_SECONDS, lambda: self._heartbeat(stream))

    def _give_up(self, stream: Stream) -> None:
        if stream is self._stream and self._session is None:
            self.close()

    def _on_closed(self, stream: Stream) -> None:
        if stream is not self._stream:
            return
        was_up = self._session is not None
        self._stream = self._session = None
        self._router.process.after(PAUSE_SECONDS, self._connect)
        if was_up:
            self._router.post(ev.WorkerLost(self._worker))


class Router:
    """One router process.

    Args:
        find: returns a worker by name, or None if the worker is not running.
        on_event: called with the router's name, each event, and the resulting commands.
        check: whether to check the dispatcher's invariants after each event.
        heartbeats: whether to send heartbeats to workers.
        run_clients: the clients if all of them can take several tokens in one call, otherwise None.
        hash_key: secret that keys the block hashes. If it is b"", prompts are not hashed, and
            workers do not report their cached blocks.
    """

    def __init__(
        self,
        name: str,
        network: Network,
        policy: Policy,
        limits: DispatcherLimits,
        find: Callable[[str], Worker | None],
        on_event: Callable[[str, ev.Event, list[ev.Command]], None] | None = None,
        check: bool = False,
        heartbeats: bool = True,
        run_clients: Mapping[int, RunClient] | None = None,
        hash_key: bytes = b"",
    ) -> None:
        self._run_clients = run_clients
        self.heartbeats = heartbeats
        self.name = name
        self.hash_key = hash_key
        # Block sizes of all workers that connected since the router's start.
        self.block_sizes: set[int] = set()
        self.process = Process(name, network.clock)
        self.dispatcher = Dispatcher(policy, limits)
        self.clients: dict[int, Client] = {}
        self._network = network
        self._find = find
        self._on_event = on_event
        self._check = check
        self._links: dict[str, Link] = {}
        self._events: deque[ev.Event] = deque()
        self._handling = False
        self.process.after(TICK_SECONDS, self._tick)

    def link(self, worker: str) -> None:
        """Connect to a worker and keep reconnecting."""
        if worker not in self._links:
            self._links[worker] = Link(self, worker, self._network, self._find)

    def close_links(self) -> None:
        """Close all streams, as the host of a killed router does."""
        for link in self._links.values():
            link.close()

    def unlink(self, worker: str) -> None:
        link = self._links.pop(worker, None)
        if link is not None:
            link.stop()

    def assign(self, worker: str, role: str) -> None:
        """Assign a role to a worker, as an operator does."""
        self.process.take(lambda: self.post(ev.RoleChanged(worker, role)))

    def submit(self, request: ev.Request, client: Client) -> None:
        self.clients[request.id] = client
        if self.hash_key:
            request = replace(request, prompt_hashes=self._hashes(request))
        self.post(ev.RequestArrived(request))

    def _hashes(self, request: ev.Request) -> Mapping[int, Sequence[int]]:
        root = root_hash(self.hash_key, request.salt)
        prompt = request.prompt
        packed = prompt if isinstance(prompt, array) else np.array(prompt, np.int32)
        tokens = packed.tobytes()
        return {size: _short_hashes(root, tokens, size) for size in self.block_sizes}

    def cancel(self, request: int) -> None:
        """Cancel a request whose client disconnected."""
        if self.clients.pop(request, None) is not None:
            self.post(ev.ClientDisconnected(request))

    def append_runs(self, event: ev.Event | SteppedRuns) -> ev.Event:
        """Append the tokens of quiet steps in one call, if the clients allow it.

        Returns the event that the dispatcher must still handle.
        """
        if not isinstance(event, SteppedRuns):
            return event
        if self._run_clients is None or self._handling:
            return event.whole()
        return append_runs(event, self.dispatcher, self._run_clients)

    def post(self, event: ev.Event) -> None:
        """Handle an event, or queue it while another event is being handled."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        while self._events:
            event = self._events.popleft()
            if isinstance(event, ev.ChoiceStopped) and event.request in self.clients:
                self.clients[event.request].on_choice_stopped(event.choice)
            commands = self.dispatcher.handle(event, self.process.clock.now)
            if self._check:
                self.dispatcher.check()
            if self._on_event is not None:
                self._on_event(self.name, event, commands)
            for command in commands:
                self._execute(command)
            if not self._events and self.dispatcher.has_more_to_assign:
                self._events.append(ev.AssignWaiting())
        self._handling = False

    def _execute(self, command: ev.Command) -> None:
        match command:
            case ev.Deliver():
                self._deliver(command.tokens)
            case ev.DeliverEnd() | ev.DeliverPrompt() | ev.EndRequest():
                client = self.clients.get(command.request)
                if client is not None:
                    self._pass_to(client, command)
            case ev.CloseStream():
                if command.worker in self._links:
                    self._links[command.worker].close()
            case ResyncCache() if not self.hash_key:
                pass  # workers report no cached blocks to this router
            case ev.Submit() | ev.Yield() | ev.Send() | ev.Drop() | ResyncCache():
                if command.worker in self._links:
                    self._links[command.worker].send(command)

    def _pass_to(
        self, client: Client, command: ev.DeliverEnd | ev.DeliverPrompt | ev.EndRequest
    ) -> None:
        match command:
            case ev.DeliverEnd():
                client.deliver_end(command)
            case ev.DeliverPrompt():
                assert command.num_cached is not None, (
                    "the router delivered prompt log probabilities, but no simulated client "
                    "requests them"
                )
                client.deliver_cached(command.num_cached)
            case ev.EndRequest():
                del self.clients[command.request]
                client.end(command)

    def _deliver(self, tokens: ev.TokenColumns) -> None:
        for request, _, choice, position, token, finish in tokens.rows():
            client = self.clients.get(request)
            if client is None:
                continue
            cut = client.deliver(choice, position, token, finish)
            if cut is not None:
                self._events.append(ev.ChoiceStopped(request, choice, cut))

    def _tick(self) -> None:
        self.post(ev.Tick())
        self.process.after(TICK_SECONDS, self._tick)


@lru_cache(maxsize=256)
def _short_hashes(root: bytes, tokens: bytes, block_size: int) -> Sequence[int]:
    """Return `short_prefix_hashes` of int32 tokens.

    Hashes of prompts that occur several times are cached.
    """
    return short_prefix_hashes(root, np.frombuffer(tokens, np.int32), block_size)
