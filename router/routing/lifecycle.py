"""The life of one request, as `docs/lifecycle.md` has it: what each event does to it.

A `Life` knows nothing of other requests, of queues or of time. It is told where to run and answers
with commands, appended to the list that its methods are handed.
"""

from enum import Enum
from math import inf

from penstock.router.routing.events import (
    Command,
    Drop,
    End,
    NewToken,
    Ready,
    Request,
    ScoredPrompt,
    Send,
    Source,
    Status,
    Submit,
    WorkerInfo,
    Yield,
)
from penstock.router.routing.hold import Hold
from penstock.router.routing.log import Log, Taken

MAX_LOSSES = 2
"""A request that has lost so many workers while it ran on them is not tried on another."""


class Phase(Enum):
    QUEUED = "queued"  # nobody has it
    RUNNING = "running"  # w runs it
    YIELDED = "yielded"  # w keeps its blocks, nobody runs it
    WAITING = "waiting"  # w keeps its blocks, v has it and has not said Ready
    MOVING = "moving"  # blocks travel from w to v
    DONE = "done"


class Life:
    """One request from arrival to end.

    Its phase is not kept but seen (`phase_of`): `here` is w while it runs, `lease` is what w keeps
    after it yielded, `next` is v. `here` and `next` at once: v was asked whether it can take over
    (a drain); w runs on until v is Ready.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.log = Log(request)
        self.attempt = 0
        self.here: Hold | None = None
        self.next: Hold | None = None
        self.lease: Source | None = None
        self.asked_in_vain = False  # a worker asked to take over could not use the blocks
        self.num_losses = 0
        self.status: Status | None = None
        # Filled by placement:
        self.then: str | None = None  # where it is meant to run on
        self.unfit: set[str] = set()  # workers on which it can never fit
        self.since = 0.0  # when it arrived
        self.asked_at = 0.0  # when the worker that is to run it next was asked
        self.num_revisions = 0  # how often it was taken back from one that had no room
        self.moving: tuple[int, float] | None = None  # blocks on their way: tokens, and since when

    @property
    def homeless(self) -> bool:
        """Nobody runs it or is to run it."""
        return self.status is None and self.here is None and self.next is None

    @property
    def askable(self) -> bool:
        """Another worker can be asked to take it over while it runs: what its worker holds is one
        list of positions that only grows."""
        alone = self.request.num_choices == 1 and not self.asked_in_vain
        return alone and self.here is not None and self.here.started

    def receives(self, worker: str) -> bool:
        """Whether blocks are on their way there."""
        hold = self.next
        return hold is not None and hold.worker == worker and hold.epoch is not None

    @property
    def working(self) -> Hold | None:
        """Whose worker can compute now; a destination cannot until the blocks are there."""
        if self.here is not None or self.next is None or self.next.epoch is None:
            return self.here or self.next
        return None

    def note_work(self, now: float) -> None:
        """Call after every change: who can compute, can since now or before."""
        for hold in (self.here, self.next):
            if hold is not None:
                hold.since = min(hold.since, now) if hold is self.working else inf

    def workers(self) -> list[str]:
        """Those that hold anything of it."""
        held = [hold.worker for hold in (self.here, self.next) if hold is not None]
        return held if self.lease is None else [*held, self.lease.worker]

    # -------------------------------------------------------------- tokens

    def take(self, worker: str, token: NewToken, out: list[Command]) -> Taken:
        """Take a token if it is the next one, from the worker whose tokens count now."""
        here = self.here
        if here is None or token.attempt != here.attempt or here.worker != worker:
            return self._take_from_next(worker, token, out)
        taken = self.log.take(token, out)
        if taken is Taken.PLAIN and not here.started:
            here.started = True
            return Taken.TURN
        if taken is Taken.TURN:
            here.started = True
            if self.log.complete:
                self.here = None  # the worker has let go by itself
                self.end(Status.OK, "", out)
        return taken

    def take_prompt(self, worker: str, scored: ScoredPrompt, out: list[Command]) -> Taken:
        """Take logprobs of the prompt from the worker whose tokens count now, or will next."""
        moved = self.here is None and self._next_is(worker, scored.attempt)
        if moved:  # it did not wait for the blocks
            self._run_on(out)
        if not self._here_is(worker, scored.attempt):
            return Taken.NOTHING
        taken = self.log.take_prompt(scored, out)
        return Taken.MOVED if moved and taken is not Taken.GAP else taken

    def _take_from_next(self, worker: str, token: NewToken, out: list[Command]) -> Taken:
        if self.next is None or not self.next.names(worker, token.attempt):
            return Taken.NOTHING
        if self.here is not None:  # it did not wait for the blocks; the other one is ahead of it
            self._ask_in_vain(out)
            return Taken.MOVED
        self._run_on(out)
        taken = self.take(worker, token, out)
        return Taken.MOVED if taken is Taken.NOTHING else taken

    def cut(self, choice: int, length: int, out: list[Command]) -> None:
        """A stop string matched: the choice ends after `length` tokens of its answer."""
        if not self.log.cut(choice, length):
            return
        if self.log.complete:
            self.end(Status.OK, "", out)
            return
        for hold in (self.here, self.next):
            if hold is not None:
                out.append(Drop(hold.worker, self.request.id, hold.attempt, choice))

    def fail_attempt(self, out: list[Command]) -> None:
        """What the running worker says cannot be used: let it go."""
        self.then = None
        self.revoke(out)
        if self.here is not None:
            out.append(Drop(self.here.worker, self.request.id, self.here.attempt))
            self.here = None

    # -------------------------------------------------------------- placing

    def place(self, info: WorkerInfo, yield_after: int, out: list[Command]) -> None:
        """Submit it there, with the lease as source where that worker can use it."""
        lease = self.lease
        if lease and (lease.worker == info.worker or lease.layout != info.layout):
            self._drop_lease(out)  # at the same worker its blocks serve as prefix cache
        hold = self._submit(info, self.lease, yield_after, out)
        if self.lease is None:
            self.here = hold
        else:
            self.next = hold

    def ask(self, info: WorkerInfo, out: list[Command]) -> None:
        """Ask a worker to take over from the one that runs it: its Ready makes that one yield."""
        assert self.here is not None
        kv_len = self.log.num_known - 1  # the last token's own KV is not computed yet
        self.next = self._submit(info, self.here.keeps(kv_len), 0, out)

    def ask_yield(self, out: list[Command]) -> None:
        if self.here is not None and not self.here.yielding:
            self.here.yielding = True
            out.append(Yield(self.here.worker, self.request.id, self.here.attempt))

    def revoke(self, out: list[Command]) -> None:
        """Take it back from the worker that is to run it next."""
        if self.next is not None:
            out.append(Drop(self.next.worker, self.request.id, self.next.attempt))
            self.next = None

    def _submit(
        self, info: WorkerInfo, source: Source | None, yield_after: int, out: list[Command]
    ) -> Hold:
        self.attempt += 1
        log, finished = self.log.copy()
        out.append(
            Submit(
                info.worker,
                self.request,
                self.attempt,
                log,
                finished,
                source,
                yield_after,
                self.log.prompt_known,
            )
        )
        return Hold(info, self.attempt, yield_after > 0)

    # -------------------------------------------------------------- handing over

    def yielded(self, worker: str, attempt: int, kv_len: int, out: list[Command]) -> None:
        """Nothing more comes from it; positions below `kv_len` are kept there."""
        if self.here is None and self._next_is(worker, attempt):
            self._run_on(out)
        here = self.here
        if here is None or not here.names(worker, attempt):
            out.append(Drop(worker, self.request.id, attempt))
            return
        self.here = None
        self.lease = here.keeps(kv_len) if kv_len else None
        if not (kv_len or here.started):
            self.then = None  # nothing was done: placement begins anew
        if self.next is not None:
            # What it was asked with lacks the tokens since: it is asked again, exactly.
            self.then = self.next.worker
            self.revoke(out)

    def ready(self, event: Ready, out: list[Command]) -> None:
        """A destination has reserved blocks: let the source send, or first stop."""
        hold = self.next
        if hold is None or not hold.names(event.worker, event.attempt):
            if not self._here_is(event.worker, event.attempt):
                out.append(Drop(event.worker, self.request.id, event.attempt))
        elif self.here is not None:
            self.ask_yield(out)
        elif self.lease is not None:
            hold.epoch = event.epoch
            out.append(_send(self.lease, event))
        else:  # the source is lost, and it would wait in vain for what nobody sends
            self._begin_again(hold, out)

    def look_at_source(self, out: list[Command]) -> bool:
        """Call now and then. True: its source has been gone for two looks, and the blocks, which
        may have been there already, did not come: they are computed."""
        hold = self.next
        if hold is None or hold.epoch is None or self.lease is not None:
            return False
        if hold.bereft:
            self._begin_again(hold, out)
            return True
        hold.bereft = True
        return False

    def _begin_again(self, hold: Hold, out: list[Command]) -> None:
        """On the worker that was to run it next, without a source."""
        self.revoke(out)
        self.here = self._submit(hold.info, None, 0, out)

    def received(self, worker: str, attempt: int, epoch: int, out: list[Command]) -> bool:
        """The blocks are in. False: of a transfer that no longer matters."""
        if self.next is None or not self._next_is(worker, attempt) or self.next.epoch != epoch:
            return False
        self._run_on(out)
        return True

    def failed(self, worker: str, attempt: int, out: list[Command]) -> bool:
        """The blocks will not come. False: of a transfer that no longer matters."""
        if self._next_is(worker, attempt):
            if self.here is None:
                self._run_on(out)
            else:
                self._ask_in_vain(out)
            return True
        if self.lease and self.lease.worker == worker and self.lease.attempt == attempt:
            self._drop_lease(out)  # the destination finds out by itself and computes them
        return False

    def _here_is(self, worker: str, attempt: int) -> bool:
        return self.here is not None and self.here.names(worker, attempt)

    def _next_is(self, worker: str, attempt: int) -> bool:
        return self.next is not None and self.next.names(worker, attempt)

    def _ask_in_vain(self, out: list[Command]) -> None:
        self.asked_in_vain = True
        self.revoke(out)

    def _run_on(self, out: list[Command]) -> None:
        self.here, self.next = self.next, None
        self._drop_lease(out)

    # -------------------------------------------------------------- trouble

    def rejected(self, worker: str, attempt: int, out: list[Command]) -> bool:
        """Not taken there. False: an old attempt."""
        if self._next_is(worker, attempt):
            self.next = None
            return True
        if not self._here_is(worker, attempt):
            return False
        self.here = None
        self.fail_attempt(out)
        return True

    def given_up(self, worker: str, attempt: int, reason: str, out: list[Command]) -> bool:
        """The worker ended it with an error of its own. False: an old attempt."""
        if self._next_is(worker, attempt):
            if self.here is not None:
                self._ask_in_vain(out)
                return True
            self._run_on(out)
        if not self._here_is(worker, attempt):
            return False
        self.here = None
        self.end(Status.INTERNAL, reason, out)
        return True

    def lost(self, worker: str, out: list[Command]) -> bool:
        """A worker is gone, with all it held. True: it was running this request."""
        if self.lease is not None and self.lease.worker == worker:
            self.lease = None
        if self.next is not None and self.next.worker == worker:
            self.next = None
        if self.then == worker:
            self.then = None
        if self.here is None or self.here.worker != worker:
            return False
        self.here = None
        self.fail_attempt(out)
        self.num_losses += 1
        if self.num_losses >= MAX_LOSSES:
            message = f"{self.num_losses} workers were lost while they ran it"
            self.end(Status.INTERNAL, message, out)
        return True

    def end(self, status: Status, message: str, out: list[Command]) -> None:
        """Let go of it everywhere; nothing is said of it afterwards."""
        self.fail_attempt(out)
        self._drop_lease(out)
        self.status = status
        out.append(End(self.request.id, status, message))

    def _drop_lease(self, out: list[Command]) -> None:
        if self.lease is not None:
            out.append(Drop(self.lease.worker, self.request.id, self.lease.attempt))
            self.lease = None


def _send(lease: Source, to: Ready) -> Send:
    return Send(lease.worker, to.request, lease.attempt, to.at, to.attempt, to.epoch, to.have)


def phase_of(life: Life) -> Phase:
    if life.status is not None:
        return Phase.DONE
    if life.here is not None:
        return Phase.RUNNING
    if life.next is not None:
        return Phase.WAITING if life.next.epoch is None else Phase.MOVING
    return Phase.QUEUED if life.lease is None else Phase.YIELDED


def check(life: Life) -> None:
    """AssertionError if what a live request says of itself does not fit together."""
    attempts = [held.attempt for held in (life.here, life.next, life.lease) if held]
    assert life.status is None, "kept after its end"
    assert not life.log.complete, "complete, but not ended"
    assert len(set(attempts)) == len(attempts), "two holders of one attempt"
    assert all(0 < attempt <= life.attempt for attempt in attempts), "a future attempt"
    assert life.here is None or life.lease is None, "a lease beside a running worker"
    assert len(set(life.workers())) == len(attempts), "one worker holds it twice"
