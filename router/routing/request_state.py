"""The life of one request, as `docs/lifecycle.md` has it: what each event does to it.

A `ProcessHandle` knows nothing of other requests, of queues or of time. It is told where to run and
answers with commands, appended to the list that its methods are handed.
"""

from enum import Enum
from math import inf

from penstock.router.routing.events import (
    Command,
    Drop,
    EndRequest,
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
from penstock.router.routing.submission import Submission
from penstock.router.routing.token_log import AppendResult, TokenLog

MAX_LOSSES = 2
"""A request that has lost so many workers while it ran on them is not tried on another."""


class Phase(Enum):
    QUEUED = "queued"  # nobody has it
    RUNNING = "running"  # w runs it
    YIELDED = "yielded"  # w keeps its blocks, nobody runs it
    WAITING = "waiting"  # w keeps its blocks, v has it and has not said Ready
    TRANSFERRING = "moving"  # blocks travel from w to v
    DONE = "done"


class RequestState:
    """One request from arrival to end.

    Its phase is not kept but seen (`phase_of`): `here` is w while it runs, `lease` is what w keeps
    after it yielded, `next` is v. `here` and `next` at once: v was asked whether it can take over
    (a drain); w runs on until v is Ready.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.token_log = TokenLog(request)
        self.attempt = 0
        self.running: Submission | None = None
        self.pending: Submission | None = None
        self.lease: Source | None = None
        self.live_migration_failed = False  # a worker asked to take over could not use the blocks
        self.num_losses = 0
        self.status: Status | None = None
        # Filled by placement:
        self.decode_target: str | None = None  # where it is meant to run on
        self.unfit_workers: set[str] = set()  # workers on which it can never fit
        self.arrived_at = 0.0  # when it arrived
        self.submitted_at = 0.0  # when the worker that is to run it next was asked
        self.num_rebalances = 0  # how often it was taken back from one that had no room
        self.transfer: tuple[int, float] | None = (
            None  # blocks on their way: tokens, and since when
        )

    @property
    def is_unassigned(self) -> bool:
        """Nobody runs it or is to run it."""
        return self.status is None and self.running is None and self.pending is None

    @property
    def can_migrate_live(self) -> bool:
        """Another worker can be asked to take it over while it runs: what its worker holds is one
        list of positions that only grows."""
        is_movable = self.request.num_choices == 1 and not self.live_migration_failed
        return is_movable and self.running is not None and self.running.started

    def is_receiving(self, worker: str) -> bool:
        """Whether blocks are on their way there."""
        hold = self.pending
        return hold is not None and hold.worker == worker and hold.epoch is not None

    @property
    def computing(self) -> Submission | None:
        """Whose worker can compute now; a destination cannot until the blocks are there."""
        if self.running is not None or self.pending is None or self.pending.epoch is None:
            return self.running or self.pending
        return None

    def update_runnable(self, now: float) -> None:
        """Call after every change: who can compute, can since now or before."""
        for hold in (self.running, self.pending):
            if hold is not None:
                hold.runnable_since = (
                    min(hold.runnable_since, now) if hold is self.computing else inf
                )

    def workers(self) -> list[str]:
        """Those that hold anything of it."""
        held = [hold.worker for hold in (self.running, self.pending) if hold is not None]
        return held if self.lease is None else [*held, self.lease.worker]

    # -------------------------------------------------------------- tokens

    def append(self, worker: str, token: NewToken, out: list[Command]) -> AppendResult:
        """Take a token if it is the next one, from the worker whose tokens count now."""
        here = self.running
        if here is None or token.attempt != here.attempt or here.worker != worker:
            return self._append_from_pending(worker, token, out)
        taken = self.token_log.append(token, out)
        if taken is AppendResult.APPENDED and not here.started:
            here.started = True
            return AppendResult.STATE_CHANGED
        if taken is AppendResult.STATE_CHANGED:
            here.started = True
            if self.token_log.is_complete:
                self.running = None  # the worker has let go by itself
                self.end(Status.OK, "", out)
        return taken

    def append_prompt_logprobs(
        self, worker: str, scored: ScoredPrompt, out: list[Command]
    ) -> AppendResult:
        """Take logprobs of the prompt from the worker whose tokens count now, or will next."""
        moved = self.running is None and self._is_pending(worker, scored.attempt)
        if moved:  # it did not wait for the blocks
            self._promote_pending(out)
        if not self._is_running(worker, scored.attempt):
            return AppendResult.DUPLICATE
        taken = self.token_log.append_prompt_logprobs(scored, out)
        return AppendResult.MOVED if moved and taken is not AppendResult.GAP else taken

    def _append_from_pending(
        self, worker: str, token: NewToken, out: list[Command]
    ) -> AppendResult:
        if self.pending is None or not self.pending.matches(worker, token.attempt):
            return AppendResult.DUPLICATE
        if self.running is not None:  # it did not wait for the blocks; the other one is ahead of it
            self._fail_live_migration(out)
            return AppendResult.MOVED
        self._promote_pending(out)
        taken = self.append(worker, token, out)
        return AppendResult.MOVED if taken is AppendResult.DUPLICATE else taken

    def stop_choice(self, choice: int, length: int, out: list[Command]) -> None:
        """A stop string matched: the choice ends after `length` tokens of its answer."""
        if not self.token_log.stop_choice(choice, length):
            return
        if self.token_log.is_complete:
            self.end(Status.OK, "", out)
            return
        for hold in (self.running, self.pending):
            if hold is not None:
                out.append(Drop(hold.worker, self.request.id, hold.attempt, choice))

    def fail_attempt(self, out: list[Command]) -> None:
        """What the running worker says cannot be used: let it go."""
        self.decode_target = None
        self.cancel_pending(out)
        if self.running is not None:
            out.append(Drop(self.running.worker, self.request.id, self.running.attempt))
            self.running = None

    # -------------------------------------------------------------- placing

    def assign(self, info: WorkerInfo, yield_after: int, out: list[Command]) -> None:
        """Submit it there, with the lease as source where that worker can use it."""
        lease = self.lease
        if lease and (lease.worker == info.worker or lease.layout != info.layout):
            self._drop_lease(out)  # at the same worker its blocks serve as prefix cache
        hold = self._submit(info, self.lease, yield_after, out)
        if self.lease is None:
            self.running = hold
        else:
            self.pending = hold

    def start_live_migration(self, info: WorkerInfo, out: list[Command]) -> None:
        """Ask a worker to take over from the one that runs it: its Ready makes that one yield."""
        assert self.running is not None
        kv_len = self.token_log.num_known - 1  # the last token's own KV is not computed yet
        self.pending = self._submit(info, self.running.lease(kv_len), 0, out)

    def request_yield(self, out: list[Command]) -> None:
        if self.running is not None and not self.running.yielding:
            self.running.yielding = True
            out.append(Yield(self.running.worker, self.request.id, self.running.attempt))

    def cancel_pending(self, out: list[Command]) -> None:
        """Take it back from the worker that is to run it next."""
        if self.pending is not None:
            out.append(Drop(self.pending.worker, self.request.id, self.pending.attempt))
            self.pending = None

    def _submit(
        self, info: WorkerInfo, source: Source | None, yield_after: int, out: list[Command]
    ) -> Submission:
        self.attempt += 1
        log, finished = self.token_log.copy()
        out.append(
            Submit(
                info.worker,
                self.request,
                self.attempt,
                log,
                finished,
                source,
                yield_after,
                self.token_log.prompt_known,
            )
        )
        return Submission(info, self.attempt, yield_after > 0)

    # -------------------------------------------------------------- handing over

    def yielded(self, worker: str, attempt: int, kv_len: int, out: list[Command]) -> None:
        """Nothing more comes from it; positions below `kv_len` are kept there."""
        if self.running is None and self._is_pending(worker, attempt):
            self._promote_pending(out)
        here = self.running
        if here is None or not here.matches(worker, attempt):
            out.append(Drop(worker, self.request.id, attempt))
            return
        self.running = None
        self.lease = here.lease(kv_len) if kv_len else None
        if not (kv_len or here.started):
            self.decode_target = None  # nothing was done: placement begins anew
        if self.pending is not None:
            # What it was asked with lacks the tokens since: it is asked again, exactly.
            self.decode_target = self.pending.worker
            self.cancel_pending(out)

    def ready(self, event: Ready, out: list[Command]) -> None:
        """A destination has reserved blocks: let the source send, or first stop."""
        hold = self.pending
        if hold is None or not hold.matches(event.worker, event.attempt):
            if not self._is_running(event.worker, event.attempt):
                out.append(Drop(event.worker, self.request.id, event.attempt))
        elif self.running is not None:
            self.request_yield(out)
        elif self.lease is not None:
            hold.epoch = event.epoch
            out.append(_send(self.lease, event))
        else:  # the source is lost, and it would wait in vain for what nobody sends
            self._restart(hold, out)

    def check_source(self, out: list[Command]) -> bool:
        """Call now and then. True: its source has been gone for two looks, and the blocks, which
        may have been there already, did not come: they are computed."""
        hold = self.pending
        if hold is None or hold.epoch is None or self.lease is not None:
            return False
        if hold.source_lost:
            self._restart(hold, out)
            return True
        hold.source_lost = True
        return False

    def _restart(self, hold: Submission, out: list[Command]) -> None:
        """On the worker that was to run it next, without a source."""
        self.cancel_pending(out)
        self.running = self._submit(hold.info, None, 0, out)

    def received(self, worker: str, attempt: int, epoch: int, out: list[Command]) -> bool:
        """The blocks are in. False: of a transfer that no longer matters."""
        if (
            self.pending is None
            or not self._is_pending(worker, attempt)
            or self.pending.epoch != epoch
        ):
            return False
        self._promote_pending(out)
        return True

    def failed(self, worker: str, attempt: int, out: list[Command]) -> bool:
        """The blocks will not come. False: of a transfer that no longer matters."""
        if self._is_pending(worker, attempt):
            if self.running is None:
                self._promote_pending(out)
            else:
                self._fail_live_migration(out)
            return True
        if self.lease and self.lease.worker == worker and self.lease.attempt == attempt:
            self._drop_lease(out)  # the destination finds out by itself and computes them
        return False

    def _is_running(self, worker: str, attempt: int) -> bool:
        return self.running is not None and self.running.matches(worker, attempt)

    def _is_pending(self, worker: str, attempt: int) -> bool:
        return self.pending is not None and self.pending.matches(worker, attempt)

    def _fail_live_migration(self, out: list[Command]) -> None:
        self.live_migration_failed = True
        self.cancel_pending(out)

    def _promote_pending(self, out: list[Command]) -> None:
        self.running, self.pending = self.pending, None
        self._drop_lease(out)

    # -------------------------------------------------------------- trouble

    def rejected(self, worker: str, attempt: int, out: list[Command]) -> bool:
        """Not taken there. False: an old attempt."""
        if self._is_pending(worker, attempt):
            self.pending = None
            return True
        if not self._is_running(worker, attempt):
            return False
        self.running = None
        self.fail_attempt(out)
        return True

    def aborted(self, worker: str, attempt: int, reason: str, out: list[Command]) -> bool:
        """The worker ended it with an error of its own. False: an old attempt."""
        if self._is_pending(worker, attempt):
            if self.running is not None:
                self._fail_live_migration(out)
                return True
            self._promote_pending(out)
        if not self._is_running(worker, attempt):
            return False
        self.running = None
        self.end(Status.INTERNAL, reason, out)
        return True

    def worker_lost(self, worker: str, out: list[Command]) -> bool:
        """A worker is gone, with all it held. True: it was running this request."""
        if self.lease is not None and self.lease.worker == worker:
            self.lease = None
        if self.pending is not None and self.pending.worker == worker:
            self.pending = None
        if self.decode_target == worker:
            self.decode_target = None
        if self.running is None or self.running.worker != worker:
            return False
        self.running = None
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
        out.append(EndRequest(self.request.id, status, message))

    def _drop_lease(self, out: list[Command]) -> None:
        if self.lease is not None:
            out.append(Drop(self.lease.worker, self.request.id, self.lease.attempt))
            self.lease = None


def _send(lease: Source, to: Ready) -> Send:
    return Send(lease.worker, to.request, lease.attempt, to.endpoint, to.attempt, to.epoch, to.have)


def phase_of(state: RequestState) -> Phase:
    if state.status is not None:
        return Phase.DONE
    if state.running is not None:
        return Phase.RUNNING
    if state.pending is not None:
        return Phase.WAITING if state.pending.epoch is None else Phase.TRANSFERRING
    return Phase.QUEUED if state.lease is None else Phase.YIELDED


def check(state: RequestState) -> None:
    """AssertionError if what a live request says of itself does not fit together."""
    attempts = [held.attempt for held in (state.running, state.pending, state.lease) if held]
    assert state.status is None, "kept after its end"
    assert not state.token_log.is_complete, "complete, but not ended"
    assert len(set(attempts)) == len(attempts), "two holders of one attempt"
    assert all(0 < attempt <= state.attempt for attempt in attempts), "a future attempt"
    assert state.running is None or state.lease is None, "a lease beside a running worker"
    assert len(set(state.workers())) == len(attempts), "one worker holds it twice"
