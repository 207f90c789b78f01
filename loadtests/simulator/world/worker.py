"""A simulated worker: the production batcher and block pool in virtual time.

The remaining code models `workers/service/session_manager`, `session` and
`kv_transfer/coordinator`. Commands take effect at step boundaries. When a router's stream ends,
everything that the worker holds for that stream is released.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from penstock.common.worker_load import WorkerLoad
from penstock.loadtests.simulator.model.executors import Executor
from penstock.loadtests.simulator.model.timed_table import TimedTable
from penstock.loadtests.simulator.model.timing import Floats
from penstock.loadtests.simulator.world.cache_stream import CacheStream
from penstock.loadtests.simulator.world.checks import check_rest
from penstock.loadtests.simulator.world.clock import Act, Clock, Process
from penstock.loadtests.simulator.world.kv_transfer import KvTransfer
from penstock.loadtests.simulator.world.messages import NewTokens, by_session, record_cached
from penstock.loadtests.simulator.world.network import Network, Stream
from penstock.loadtests.simulator.world.sent_steps import send_steps, send_yielded
from penstock.loadtests.simulator.world.session import HeldSequence, Key, Session, WorkerShape
from penstock.loadtests.simulator.world.steps import StepRunner
from penstock.loadtests.simulator.world.submissions import new_sequence
from penstock.loadtests.simulator.world.transfer_endpoints import Receiver
from penstock.router.routing.events import (
    Draining,
    Drop,
    Heartbeat,
    Rejected,
    Send,
    Stepped,
    Submit,
    TokenColumns,
    WorkerCommand,
    Yield,
)
from penstock.router.routing.prefix_cache.cache_events import ResyncCache
from penstock.router.routing.transfer_peers import ConnectPeers
from penstock.workers.kv_transfer.protocol.messages import WorkerId
from penstock.workers.scheduling import sequence as seq
from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.stats import queue_sizes

HEARTBEAT_SECONDS = 0.5
MAX_SILENT_HEARTBEATS = 10
"""Number of heartbeat intervals without a message after which a stream is closed."""
PROGRESS_SECONDS = 2.0
"""Interval at which a fast-forward is interrupted to report progress to routers.

Without these reports, routers would consider the worker stuck.
"""

Find = Callable[[WorkerId], "Worker | None"]


class Worker:
    """One worker process.

    Args:
        find: returns a worker by name and incarnation, or None if the worker is not running.
        check_every: number of steps between checks of the block invariants; 0 means never.
        fast_forwards: whether to combine quiet steps into one event.
        heartbeats: whether to send heartbeats and close silent streams. If not, call `report_load`.
    """

    def __init__(
        self,
        shape: WorkerShape,
        executor: Executor,
        network: Network,
        find: Find,
        check_every: int = 0,
        fast_forwards: bool = False,
        heartbeats: bool = True,
    ) -> None:
        self.info = shape.info
        self.process = Process(shape.info.worker, network.clock)
        table = None if executor.reads_tokens else TimedTable.of(shape.limits)
        self.batcher = Batcher(shape.limits, table)
        self.executor = executor
        self.draining = False
        self.reports_step_seconds = False
        self.sessions: dict[int, Session] = {}
        self.steps = StepRunner(
            self.process, self.batcher, executor, self, fast_forwards, check_every
        )
        self.process.disturbed = self.steps.disturb
        self.cache_stream = CacheStream(shape.info, self.batcher.pool, self.clock, self.steps.post)
        self.load = self._load()  # load of the worker after its last step
        self._num_sessions = 0
        self._heartbeats = heartbeats
        self._new: dict[Key, seq.NewSequence] = {}

        components = self.steps, self.batcher, executor, self.process, network, self.sessions
        self.kv_transfer = KvTransfer(shape, *components, partial(_receiver_of, find))

    @property
    def clock(self) -> Clock:
        return self.process.clock

    @property
    def idle(self) -> bool:
        """Return True if the worker holds no sequence for any router."""
        return not any(session.held for session in self.sessions.values())

    # ------------------------------------------------------------ sessions

    def attach(
        self, router: str, stream: Stream, deliver: Callable[[Any], None], ended: Act
    ) -> Session:
        """Open a session for a router's new stream. An earlier session of the router is closed."""
        self.steps.catch_up()
        for earlier in list(self.sessions.values()):
            if earlier.router == router:
                self.close_stream(earlier)
        self._num_sessions += 1
        now = self.clock.now
        session = Session(self._num_sessions, router, stream, deliver, ended, now, now)
        self.sessions[session.number] = session
        if self.draining:
            session.send(Draining(self.info.worker), now)
        if self._heartbeats:
            self.process.after(HEARTBEAT_SECONDS, lambda: self._heartbeat(session))
        return session

    def close_stream(self, session: Session) -> None:
        """Close a stream from the worker's side."""
        self.steps.catch_up()
        session.stream.down.closed = True
        session.stream.up.send(session.ended)
        self.close(session)

    def close(self, session: Session) -> None:
        """Release everything that is held for a session whose stream has ended."""
        self.steps.catch_up()
        if self.sessions.pop(session.number, None) is not None:
            self.cache_stream.close(session)
            self.kv_transfer.forget_peers(session)
            self._release(session, list(session.held))

    def drain(self) -> None:
        """Reject new requests from now on. The routers are notified, and fast-forwarding stops."""
        self.steps.catch_up()
        self.steps.fast_forwards = False
        self.draining = True
        for session in self.sessions.values():
            session.send(Draining(self.info.worker), self.clock.now)

    def _load(self) -> WorkerLoad:
        return self.batcher.load()._replace(
            last_step_seconds=self.steps.last_seconds,
            num_steps=self.steps.num_steps,
            step_seconds=self.steps.busy_seconds if self.reports_step_seconds else 0.0,
            prompt_seconds=self.steps.prompt_seconds,
        )

    def _heartbeat(self, session: Session) -> None:
        if session.number not in self.sessions:
            return
        now = self.clock.now
        if now - session.last_received_at >= MAX_SILENT_HEARTBEATS * HEARTBEAT_SECONDS:
            self.close_stream(session)
            return
        if self.steps.is_fast_forwarding and now - session.load_sent_at >= PROGRESS_SECONDS:
            self.steps.catch_up()
        if now - session.last_sent_at >= HEARTBEAT_SECONDS * 0.99:
            if self.load is session.load:
                session.send(Heartbeat(self.info.worker), now)
            else:
                self._put_load(session)
        self.process.after(HEARTBEAT_SECONDS, lambda: self._heartbeat(session))

    # ------------------------------------------------------------ messages from the router

    def handle(self, session: Session, command: WorkerCommand | None) -> None:
        """Handle one message from a router, where None is a heartbeat."""
        if session.number not in self.sessions:
            return
        session.last_received_at = self.clock.now
        if command is not None:
            self.steps.catch_up()
        match command:
            case Submit():
                self._submit(session, command)
            case Yield(_, request, attempt):
                key = Key(session.number, request, attempt)
                self.steps.post(lambda: self.batcher.request_yield(key))
            case Send():
                self.steps.post(partial(self.kv_transfer.send, session, command))
            case Drop(_, request, attempt, choice):
                self._drop_command(session, Key(session.number, request, attempt), choice)
            case ResyncCache():
                self.cache_stream.resync(session)
            case ConnectPeers():
                self.kv_transfer.set_peers(session, command)

    def _submit(self, session: Session, submit: Submit) -> None:
        key = Key(session.number, submit.request.id, submit.attempt)
        others = [held for held in session.held if held.request == key.request]
        if any(other.attempt >= key.attempt for other in others):
            self._reject(session, key, "this or a later attempt is already on this worker", True)
            return
        if self.draining:
            self._reject(session, key, "the worker is draining", False)
            return
        new = new_sequence(key, submit, self.info)
        # Release earlier attempts except leases, one of which may be the source of this attempt.
        self._release(session, [other for other in others if not session.held[other].kv_len])
        source = submit.source
        taken = source is not None and new.source_len
        session.held[key] = HeldSequence(
            (source.worker, source.incarnation) if source and taken else None
        )
        self.steps.post(lambda: self._enter(session, new))

    def _enter(self, session: Session, new: seq.NewSequence) -> None:
        key = cast(Key, new.key)
        try:
            self.batcher.submit(new)
            self._new[key] = new
        except (seq.NeverFits, seq.QueueFull) as error:
            if session.held.pop(key, None) is not None:
                self._reject(session, key, str(error), isinstance(error, seq.NeverFits))

    def _reject(self, session: Session, key: Key, reason: str, never: bool) -> None:
        rejected = Rejected(self.info.worker, key.request, key.attempt, reason, never)
        session.send(rejected, self.clock.now)

    def _drop_command(self, session: Session, key: Key, choice: int | None) -> None:
        if key not in session.held:
            return
        if choice is None:
            self._release(session, [key])
        else:
            self.steps.post(lambda: self.batcher.drop_choice(key, choice))

    def _release(self, session: Session, keys: list[Key]) -> None:
        """Drop sequences, which may be in any state, and abort their transfers."""
        if not keys:
            return
        self.steps.post(lambda: self._drop(keys))
        for key in keys:
            self.kv_transfer.cancel(session.held.pop(key))

    def _drop(self, keys: list[Key]) -> None:
        for key in keys:
            self.batcher.drop(key)
            self._new.pop(key, None)

    # ------------------------------------------------------------ steps

    def on_steps(
        self, output: seq.StepOutput, tokens: seq.Ints, ends: Floats, passed: bool
    ) -> None:
        """Send each router the new tokens of its sequences."""
        self.load = self._load()
        for session, rows in by_session(output, self.sessions):
            news = NewTokens(output, tokens, rows)
            send_steps(self.info.worker, session, news, ends, self.load, self.clock.now, passed)
        self.cache_stream.send()
        self.on_plan()

    def is_load_known(self) -> bool:
        """Return True if `load` has the current numbers of queued and running sequences."""
        load, state = self.load, self.batcher.state
        return queue_sizes(state) == (load.queued, load.queued_tokens, load.running)

    def on_idle(self) -> None:
        """Send the load to all routers. Called when the worker becomes idle."""
        self.load = self._load()
        for session in self.sessions.values():
            self._put_load(session)
        self.cache_stream.send()

    def _put_load(self, session: Session) -> None:
        session.load, session.load_sent_at = self.load, self.clock.now
        stepped = Stepped(
            self.info.worker, TokenColumns(), self.load, (), (), session.take_cached()
        )
        session.send(stepped, self.clock.now)

    def on_plan(self) -> None:
        """Handle the batcher's events."""
        for event in self.batcher.events():
            key = cast(Key, event.key)
            match event:
                case seq.Admitted(_, row, _, num_cached):
                    self.executor.admit(row, self._new[key].params)
                    record_cached(self.sessions, key, num_cached)
                case seq.Reserved(_, have):
                    self.kv_transfer.expect(key, have, self._new[key].source_len)
                case seq.Yielded(_, kv_len):
                    self._new.pop(key, None)
                    send_yielded(self.info.worker, self.sessions, key, kv_len, self.clock.now)
                case seq.Finished():
                    self._new.pop(key, None)
                    session = self.sessions.get(key.session)
                    if session is not None:
                        session.held.pop(key, None)

    def check_rest(self) -> None:
        """Raise AssertionError if the worker holds anything after all requests have ended."""
        check_rest(self.batcher, self.info.worker)
        assert self.idle, f"worker {self.info.worker} still holds sequences for a router"
        self.kv_transfer.check_rest()


def _receiver_of(find: Find, name: WorkerId) -> Receiver | None:
    worker = find(name)
    return None if worker is None else worker.kv_transfer.receiver


def report_load(worker: Worker) -> None:
    """Send the load to each router that does not know it.

    Must be called every HEARTBEAT_SECONDS.
    """
    latest = worker.clock.now - HEARTBEAT_SECONDS * 0.99
    for session in worker.sessions.values():
        if session.load is not worker.load and session.last_sent_at <= latest:
            worker._put_load(session)
