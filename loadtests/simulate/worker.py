"""A worker: the production batcher and block pool, in a shell that lives in virtual time.

The shell does what `workers/dispatch`, `session` and `transfer/handover` do for real: commands take
effect at step boundaries, what is held for a router's stream goes when that stream ends.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import numpy as np

from penstock.loadtests.simulate.checks import check, check_rest
from penstock.loadtests.simulate.clock import Act, Clock, Process
from penstock.loadtests.simulate.executors import Executor
from penstock.loadtests.simulate.handover import (
    Destination,
    Expected,
    Name,
    Outgoing,
    Source,
)
from penstock.loadtests.simulate.network import Network, Stream
from penstock.loadtests.simulate.session import Held, Key, Session, Shape
from penstock.router.routing.events import (
    Draining as SaysDraining,
)
from penstock.router.routing.events import (
    Drop,
    Event,
    Failed,
    Heard,
    Load,
    Meeting,
    NewToken,
    Ready,
    Received,
    Rejected,
    Send,
    Stepped,
    Submit,
    Yield,
    Yielded,
)
from penstock.router.routing.events import Finish as WireFinish
from penstock.workers.scheduling import sequence as seq
from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.kv_pool import State
from penstock.workers.transfer.shards import BlockShape

BEAT_SECONDS = 0.5
BEATS = 10
"""So many beats of silence end a stream."""

FINISHES = tuple(WireFinish)


Find = Callable[[Name], "Worker | None"]


class Worker:
    """One process.

    Args:
        check_every: steps after which the ledger is looked at again; 0: never.
        find: a worker by name and incarnation, if it is there.
    """

    def __init__(
        self,
        shape: Shape,
        executor: Executor,
        network: Network,
        find: Find,
        check_every: int = 0,
    ) -> None:
        self.info = shape.info
        self.process = Process(shape.info.worker, network.clock)
        self.batcher = Batcher(shape.limits)
        self.executor = executor
        self.draining = False
        self.sessions: dict[int, Session] = {}
        self.num_steps = 0
        self.num_tokens = 0
        self.busy_seconds = 0.0
        self.prompt_seconds = 0.0  # of the steps that computed prompts
        self._check_every = check_every
        self._inbox: deque[Act] = deque()
        self._in_step = False
        self._step_seconds = 0.0
        self.load = self._load()  # as of the last step
        self._num_sessions = 0
        self._new: dict[Key, seq.NewSequence] = {}
        self._name = (shape.info.worker, shape.info.incarnation)
        geometry = BlockShape(shape.limits.block_size, shape.bytes_per_block)
        self.destination = Destination(self.process, geometry, shape.pace, self._write)

        def peer(name: Name) -> tuple[Process, Destination] | None:
            worker = find(name)
            return None if worker is None else (worker.process, worker.destination)

        self.source = Source(
            self.process, self._name, network, geometry, shape.pace, self._read, peer
        )

    @property
    def clock(self) -> Clock:
        return self.process.clock

    @property
    def idle(self) -> bool:
        """Whether nothing is held for anybody."""
        return not any(session.held for session in self.sessions.values())

    # ------------------------------------------------------------ sessions

    def attach(
        self, router: str, stream: Stream, tell: Callable[[Event], None], ended: Act
    ) -> Session:
        """A router's stream begins; an earlier one of the same router ends first."""
        for earlier in list(self.sessions.values()):
            if earlier.router == router:
                self.hang_up(earlier)
        self._num_sessions += 1
        now = self.clock.now
        session = Session(self._num_sessions, router, stream, tell, ended, now, now)
        self.sessions[session.number] = session
        if self.draining:
            session.put(SaysDraining(self.info.worker), now)
        self.process.after(BEAT_SECONDS, lambda: self._beat(session))
        return session

    def hang_up(self, session: Session) -> None:
        """End a stream from here."""
        session.stream.down.closed = True
        session.stream.up.send(session.ended)
        self.close(session)

    def close(self, session: Session) -> None:
        """Its stream has ended: everything that is here for it goes."""
        if self.sessions.pop(session.number, None) is not None:
            self._let_go(session, list(session.held))

    def drain(self) -> None:
        """Take nothing new, and tell the routers."""
        self.draining = True
        for session in self.sessions.values():
            session.put(SaysDraining(self.info.worker), self.clock.now)

    def _load(self) -> Load:
        pool = self.batcher.load()
        return Load(
            pool.queued,
            pool.queued_tokens,
            pool.running,
            pool.free_blocks,
            pool.cached_blocks,
            pool.leased_blocks,
            self._step_seconds,
        )

    def _beat(self, session: Session) -> None:
        if session.number not in self.sessions:
            return
        now = self.clock.now
        if now - session.heard >= BEATS * BEAT_SECONDS:
            self.hang_up(session)
            return
        if now - session.told >= BEAT_SECONDS * 0.99:
            if self.load is session.load:
                session.put(Heard(self.info.worker), now)
            else:
                self._put_step(session, [], [])
        self.process.after(BEAT_SECONDS, lambda: self._beat(session))

    # ------------------------------------------------------------ from the router

    def obey(self, session: Session, command: Submit | Yield | Send | Drop | None) -> None:
        """Carry out one message; None is a beat."""
        if session.number not in self.sessions:
            return
        session.heard = self.clock.now
        match command:
            case Submit():
                self._submit(session, command)
            case Yield(_, request, attempt):
                key = Key(session.number, request, attempt)
                self._post(lambda: self.batcher.ask_yield(key))
            case Send():
                self._post(partial(self._send, session, command))
            case Drop(_, request, attempt, choice):
                self._let_go_of(session, Key(session.number, request, attempt), choice)

    def _submit(self, session: Session, submit: Submit) -> None:
        key = Key(session.number, submit.request.id, submit.attempt)
        others = [held for held in session.held if held.request == key.request]
        if any(other.attempt >= key.attempt for other in others):
            self._reject(session, key, "this attempt is here already, or a later one", True)
            return
        if self.draining:
            self._reject(session, key, "the worker is draining", False)
            return
        new = self._sequence(key, submit)
        # This attempt replaces what else runs here of the request; a lease may be its source.
        self._let_go(session, [other for other in others if not session.held[other].kv_len])
        source = submit.source
        taken = source is not None and new.source_len
        session.held[key] = Held((source.worker, source.incarnation) if source and taken else None)
        self._post(lambda: self._enter(session, new))

    def _sequence(self, key: Key, submit: Submit) -> seq.NewSequence:
        """As `workers/wire` makes it."""
        request, source = submit.request, submit.source
        first, *others = [
            seq.Sibling(choice, [*request.prompt, *answer])
            for choice, answer in enumerate(submit.log)
            if not submit.finished[choice]
        ]
        own = source is not None and (source.worker, source.incarnation) == self._name
        source_len = 0
        if source is not None and not own and source.layout == self.info.layout:
            lengths = [len(one.tokens) for one in (first, *others)]
            source_len = seq.usable_source(source.kv_len, len(request.prompt), lengths)
        return seq.NewSequence(
            key=key,
            tokens=first.tokens,
            num_prompt=len(request.prompt),
            params=cast(seq.SamplingParams, request.params),
            choice=first.choice,
            yield_after=submit.yield_after,
            priority=request.priority,
            salt=request.salt,
            source_len=source_len,
            siblings=tuple(others),
        )

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
        session.put(rejected, self.clock.now)

    def _let_go_of(self, session: Session, key: Key, choice: int | None) -> None:
        if key not in session.held:
            return
        if choice is None:
            self._let_go(session, [key])
        else:
            self._post(lambda: self.batcher.drop_choice(key, choice))

    def _let_go(self, session: Session, keys: list[Key]) -> None:
        """Drop these, in whatever form they are held; what is being received or sent is cut."""
        if not keys:
            return
        self._post(lambda: self._drop(keys))
        for key in keys:
            held = session.held.pop(key)
            if held.epoch:
                self.destination.close(held.epoch)
            for outgoing in held.sends:
                outgoing.aborted = True

    def _drop(self, keys: list[Key]) -> None:
        for key in keys:
            self.batcher.drop(key)
            self._new.pop(key, None)

    # ------------------------------------------------------------ hand-over

    def _send(self, session: Session, command: Send) -> None:
        key = Key(session.number, command.request, command.attempt)
        held = session.held.get(key)
        size = self.batcher.limits.block_size
        if held is None or not command.have < held.kv_len or command.have % size:
            self.source.refuse(command)
            return
        try:
            blocks = self.batcher.pin(key, command.have)
        except seq.LeaseGone:
            self.source.refuse(command)
            return
        unpin = partial(self._post, lambda: self.batcher.unpin(key))
        outgoing = Outgoing(command, session.router, held.kv_len, blocks, unpin)
        held.sends.append(outgoing)
        self.source.send(outgoing)

    def _expect(self, key: Key, have: int) -> None:
        """The scheduler has reserved blocks: have them filled, if they are still wanted."""
        session = self.sessions.get(key.session)
        held = session.held.get(key) if session is not None else None
        stop, blocks = self._new[key].source_len, self.batcher.receiving(key)
        if session is None or held is None or held.source is None:
            self._post(lambda: self.batcher.settled(key))
            return
        expected = Expected(
            session.router, key.request, key.attempt, held.source, have, stop, blocks
        )
        judge = partial(self._judge, session, key)
        held.epoch = epoch = self.destination.open(expected, lambda why: judge(epoch, why))
        at = Meeting(*self._name, "address", "secret")
        ready = Ready(self.info.worker, key.request, key.attempt, epoch, have, at)
        session.put(ready, self.clock.now)

    def _judge(self, session: Session, key: Key, epoch: int, reason: str) -> None:
        """Nothing of the transfer is being written any more."""
        about = (self.info.worker, key.request, key.attempt, epoch)
        if key not in session.held:
            self._post(lambda: self.batcher.settled(key))
        elif not reason:
            self._post(lambda: self.batcher.arrived(key))
            session.put(Received(*about), self.clock.now)
        else:
            self._post(lambda: self.batcher.missed(key))
            session.put(Failed(*about, reason), self.clock.now)

    # ------------------------------------------------------------ steps

    def _post(self, act: Act) -> None:
        """At the next step boundary, which may be now."""
        self._inbox.append(act)
        if not self._in_step:
            self._in_step = True
            self.process.after(0.0, self._boundary)

    def _boundary(self) -> None:
        """Do what was asked for meanwhile, and begin the next step if there is one."""
        told = bool(self._inbox)
        while self._inbox:
            self._inbox.popleft()()
        batcher = self.batcher
        if self._check_every:
            free = np.flatnonzero(batcher.pool.state == State.FREE)
            self.executor.spoil(free.astype(np.int32))
        plan = batcher.plan(self.clock.now)
        self._note()
        if self._check_every and self.num_steps % self._check_every == 0:
            check(self.batcher, plan)
        if plan is None:
            self._in_step = False
            if told:
                self.load = self._load()
                for session in self.sessions.values():
                    self._put_step(session, [], [])
            if self._inbox:
                self._in_step = True
                self.process.after(0.0, self._boundary)
            return
        seconds = self.executor.seconds(plan)
        self.process.after(seconds, lambda: self._commit(plan, seconds))

    def _commit(self, plan: seq.StepPlan, seconds: float) -> None:
        output = self.batcher.commit(plan, self.executor.run(plan, self.batcher.table.choices))
        self.num_steps += 1
        self.num_tokens += len(output.keys)
        self.busy_seconds += seconds
        if len(plan.tokens) > len(plan.rows):
            self.prompt_seconds += seconds
        self._step_seconds = seconds
        self.load = self._load()
        self._spread(output)
        self._note()
        self._boundary()

    def _spread(self, output: seq.StepOutput) -> None:
        tokens: dict[int, list[NewToken]] = {}
        columns = (output.choices, output.indices, output.tokens, output.finishes)
        rows = zip(output.keys, *(column.tolist() for column in columns), strict=True)
        for name, choice, index, token, finish in rows:
            key = cast(Key, name)
            session = self.sessions.get(key.session)
            if session is None or key not in session.held:
                continue
            new = NewToken(key.request, key.attempt, choice, index, token, FINISHES[finish])
            tokens.setdefault(key.session, []).append(new)
        for number, mine in tokens.items():
            self._put_step(self.sessions[number], mine, [])

    def _put_step(
        self, session: Session, tokens: list[NewToken], ended: list[tuple[int, int, str]]
    ) -> None:
        session.load = self.load
        step = Stepped(self.info.worker, tokens, session.load, ended)
        session.put(step, self.clock.now)

    def _note(self) -> None:
        for event in self.batcher.events():
            key = cast(Key, event.key)
            match event:
                case seq.Reserved(_, have):
                    self._expect(key, have)
                case seq.Yielded(_, kv_len):
                    self._new.pop(key, None)
                    self._yielded(key, kv_len)
                case seq.Finished():
                    self._new.pop(key, None)
                    session = self.sessions.get(key.session)
                    if session is not None:
                        session.held.pop(key, None)

    def _yielded(self, key: Key, kv_len: int) -> None:
        session = self.sessions.get(key.session)
        if session is None or key not in session.held:
            return
        if kv_len:
            session.held[key].kv_len = kv_len
        else:
            del session.held[key]
        event = Yielded(self.info.worker, key.request, key.attempt, kv_len)
        session.put(event, self.clock.now)

    # ------------------------------------------------------------ always true

    def _write(self, blocks: seq.Ints, content: Sequence[int]) -> None:
        """For a transfer: nobody else may hold what it writes."""
        states = self.batcher.pool.state[blocks]
        assert (states == State.RESERVED).all(), "a transfer writes blocks that are not its own"
        self.executor.write(blocks, content)

    def _read(self, blocks: seq.Ints) -> Sequence[int]:
        """For a transfer: what it reads has to be kept."""
        states = self.batcher.pool.state[blocks]
        assert (states <= State.LEASED).all(), "a transfer reads blocks that nobody keeps"
        return self.executor.read(blocks)

    def check_rest(self) -> None:
        """AssertionError if anything is held for somebody now that all have ended."""
        check_rest(self.batcher, self.info.worker)
        assert self.idle, f"{self.info.worker} holds something for nobody"
        assert not self.destination.transfers, f"{self.info.worker} waits for a transfer"
