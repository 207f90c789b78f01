"""State machine of one request, as specified in `docs/lifecycle.md`.

A `RequestState` is independent of other requests, of queues and of time. `RequestTable` assigns the
workers. The methods append their commands to the argument `out`.
"""

from enum import Enum

from penstock.router.routing.events import (
    Command,
    Drop,
    EndRequest,
    Ready,
    Request,
    ScoredPrompt,
    Send,
    Source,
    Status,
    WorkerInfo,
)
from penstock.router.routing.prefix_cache.cache_claims import CacheClaim
from penstock.router.routing.submission import Submission, Submissions
from penstock.router.routing.token_log import AppendResult

MAX_LOSSES = 2
"""A request fails after this many workers were lost while they ran it."""


class Phase(Enum):
    """Phase of a request, derived from its `RequestState` by `phase_of`."""

    QUEUED = "queued"  # the request is on no worker
    RUNNING = "running"  # a worker runs the request
    YIELDED = "yielded"  # the worker has stopped the request but keeps its KV blocks
    WAITING = "waiting"  # the request is submitted to the next worker, which has not sent Ready
    TRANSFERRING = "moving"  # the KV blocks are being sent to the next worker
    DONE = "done"


class RequestState(Submissions):
    """State of one request from arrival to end.

    The base class manages the workers of the request. This class handles tokens and the messages of
    workers. `phase_of` derives the phase.
    """

    def __init__(self, request: Request) -> None:
        super().__init__(request)
        self.live_migration_failed = False  # if True, no other live migration is tried
        self.num_losses = 0
        self.status: Status | None = None
        # `RequestTable` sets the following attributes.
        self.decode_target: str | None = None  # next worker, once the current worker yields
        self.unfit_workers: set[str] = set()  # workers on which the request can never fit
        self.cache_claim: CacheClaim | None = None  # claim of the worker of the last placement
        self.arrived_at = 0.0  # in seconds of the router's monotonic clock
        self.submitted_at = 0.0  # time of the last submission, on the same clock
        self.num_rebalances = 0  # how often the request was taken back from a full worker
        # The running KV transfer: number of tokens and start time.
        self.transfer: tuple[int, float] | None = None

    @property
    def is_unassigned(self) -> bool:
        """Whether the request has not ended and is neither running nor pending on a worker."""
        return self.status is None and self.running is None and self.pending is None

    @property
    def can_migrate_live(self) -> bool:
        """Whether the request can move while it runs: it has one choice and at least one token."""
        is_movable = self.request.num_choices == 1 and not self.live_migration_failed
        return is_movable and self.running is not None and self.running.started

    # -------------------------------------------------------------- tokens

    def append(
        self,
        worker: str,
        attempt: int,
        choice: int,
        position: int,
        token: int,
        finish: int,
        out: list[Command],
    ) -> AppendResult:
        """Append a token if it is the next one of its choice and not from an old attempt."""
        here = self.running
        if here is None or attempt != here.attempt or here.worker != worker:
            ignored = self._start_pending(worker, attempt, out)
            if ignored is not None:
                return ignored
            result = self.append(worker, attempt, choice, position, token, finish, out)
            return AppendResult.MOVED if result is AppendResult.DUPLICATE else result
        log = self.token_log
        answers, finished = log.answers, log.finished
        if choice >= len(answers) or finished[choice] or position != len(answers[choice]):
            return log.refusal(choice, position)
        answers[choice].append(token)
        if here.started and not finish:
            return AppendResult.APPENDED
        here.started, finished[choice] = True, bool(finish)
        if log.is_complete:
            self.running = None  # the worker releases a finished request without a Drop command
            self.end(Status.OK, "", out)
        return AppendResult.STATE_CHANGED

    def _start_pending(self, worker: str, attempt: int, out: list[Command]) -> AppendResult | None:
        """Make the pending worker the running one, because its first token has arrived.

        Return None, or a result if the token must be ignored.
        """
        if not self._is_pending(worker, attempt):
            return AppendResult.DUPLICATE
        if self.running is not None:  # the new worker recomputes tokens instead of getting blocks
            self._fail_live_migration(out)
            return AppendResult.MOVED
        self._promote_pending(out)
        return None

    def append_prompt_logprobs(
        self, worker: str, scored: ScoredPrompt, out: list[Command]
    ) -> AppendResult:
        """Append prompt logprobs that the running or the pending worker has computed."""
        moved = self.running is None and self._is_pending(worker, scored.attempt)
        if moved:  # the pending worker started without waiting for blocks
            self._promote_pending(out)
        if not self._is_running(worker, scored.attempt):
            return AppendResult.DUPLICATE
        taken = self.token_log.append_prompt_logprobs(scored, out)
        return AppendResult.MOVED if moved and taken is not AppendResult.GAP else taken

    def stop_choice(self, choice: int, length: int, out: list[Command]) -> None:
        """End a choice after `length` tokens of its answer, because a stop string matched."""
        if not self.token_log.stop_choice(choice, length):
            return
        if self.token_log.is_complete:
            self.end(Status.OK, "", out)
            return
        for hold in (self.running, self.pending):
            if hold is not None:
                out.append(Drop(hold.worker, self.request.id, hold.attempt, choice))

    def fail_attempt(self, out: list[Command]) -> None:
        """Drop the request at its running and pending workers, so that it is placed again."""
        self.decode_target = None
        self.cancel_pending(out)
        if self.running is not None:
            out.append(Drop(self.running.worker, self.request.id, self.running.attempt))
            self.running = None

    # -------------------------------------------------------------- placing

    def start_live_migration(self, info: WorkerInfo, out: list[Command]) -> None:
        """Submit a running request to a second worker. When Ready arrives, the first must yield."""
        assert self.running is not None
        kv_len = self.token_log.num_known - 1  # the newest token has no KV yet
        self.pending = self._submit(info, self.running.lease(kv_len), 0, out)

    # -------------------------------------------------------------- KV transfer

    def yielded(self, worker: str, attempt: int, kv_len: int, out: list[Command]) -> None:
        """Handle Yielded: the worker keeps the blocks of positions [0, `kv_len`)."""
        if self.running is None and self._is_pending(worker, attempt):
            self._promote_pending(out)
        here = self.running
        if here is None or not here.matches(worker, attempt):
            out.append(Drop(worker, self.request.id, attempt))
            return
        self.running = None
        self.lease = here.lease(kv_len) if kv_len else None
        if not (kv_len or here.started):
            self.decode_target = None  # nothing was computed, so workers must be chosen again
        if self.pending is not None:
            # The pending Submit lacks the newest tokens; `RequestTable` submits a new one.
            self.decode_target = self.pending.worker
            self.cancel_pending(out)

    def ready(self, event: Ready, out: list[Command]) -> None:
        """Handle Ready: let the source send its blocks; if it still runs, it must yield first."""
        hold = self.pending
        if hold is None or not hold.matches(event.worker, event.attempt):
            if not self._is_running(event.worker, event.attempt):
                out.append(Drop(event.worker, self.request.id, event.attempt))
        elif self.running is not None:
            self.request_yield(out)
        elif self.lease is not None:
            hold.epoch = event.epoch
            out.append(_send(self.lease, event))
        else:  # the source is lost, so no blocks will arrive
            self._restart(hold, out)

    def check_source(self, out: list[Command]) -> bool:
        """Restart the pending submission without a source if a transfer has lost its source.

        The first call that finds the source lost only marks the submission, because all blocks may
        already have been sent. The next call restarts the submission and returns True.
        """
        hold = self.pending
        if hold is None or hold.epoch is None or self.lease is not None:
            return False
        if hold.source_lost:
            self._restart(hold, out)
            return True
        hold.source_lost = True
        return False

    def _restart(self, hold: Submission, out: list[Command]) -> None:
        """Replace the pending submission by a new one to the same worker, without a source."""
        self.cancel_pending(out)
        self.running = self._submit(hold.info, None, 0, out)

    def received(self, worker: str, attempt: int, epoch: int, out: list[Command]) -> bool:
        """Handle Received. Return False if the message belongs to an old transfer."""
        hold = self.pending
        if hold is None or not hold.matches(worker, attempt) or hold.epoch != epoch:
            return False
        self._promote_pending(out)
        return True

    def failed(self, worker: str, attempt: int, epoch: int, out: list[Command]) -> bool:
        """Handle Failed. Return True if the pending worker reported the failure."""
        if self._is_pending(worker, attempt):
            if self.running is None:
                self._promote_pending(out)
            else:
                self._fail_live_migration(out)
            return True
        is_source = self.lease and (self.lease.worker, self.lease.attempt) == (worker, attempt)
        if is_source and self.pending is not None and self.pending.epoch == epoch:
            # The destination will detect the failure and recompute the tokens. The failure of an
            # earlier transfer, for example to a worker that was lost, does not affect the lease.
            self._drop_lease(out)
        return False

    def _fail_live_migration(self, out: list[Command]) -> None:
        self.live_migration_failed = True
        self.cancel_pending(out)

    # -------------------------------------------------------------- failures

    def rejected(self, worker: str, attempt: int, out: list[Command]) -> bool:
        """Handle Rejected. Return False if the message belongs to an old attempt."""
        if self._is_pending(worker, attempt):
            self.pending = None
            return True
        if not self._is_running(worker, attempt):
            return False
        self.running = None
        self.fail_attempt(out)
        return True

    def aborted(self, worker: str, attempt: int, reason: str, out: list[Command]) -> bool:
        """Handle a failure on the worker. Return False if the failure is of an old attempt."""
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
        """Remove a lost worker from this state. Return True if that worker ran the request."""
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
            message = f"{self.num_losses} workers were lost while running this request"
            self.end(Status.INTERNAL, message, out)
        return True

    def end(
        self, status: Status, message: str, out: list[Command], retry_after: float | None = None
    ) -> None:
        """Drop the request at all workers and report its end."""
        self.fail_attempt(out)
        self._drop_lease(out)
        self.status = status
        out.append(EndRequest(self.request.id, status, message, retry_after))


def _send(lease: Source, to: Ready) -> Send:
    return Send(lease.worker, to.request, lease.attempt, to.endpoint, to.attempt, to.epoch, to.have)


def phase_of(state: RequestState) -> Phase:
    """Return the phase of a request."""
    if state.status is not None:
        return Phase.DONE
    if state.running is not None:
        return Phase.RUNNING
    if state.pending is not None:
        return Phase.WAITING if state.pending.epoch is None else Phase.TRANSFERRING
    return Phase.QUEUED if state.lease is None else Phase.YIELDED


def check(state: RequestState) -> None:
    """Assert that the state of a request that has not ended is consistent."""
    attempts = [held.attempt for held in (state.running, state.pending, state.lease) if held]
    assert state.status is None, "the request has ended, but its state is still kept"
    assert not state.token_log.is_complete, (
        "all choices of the request have ended, but the request is not marked as ended"
    )
    assert len(set(attempts)) == len(attempts), "two workers hold the same attempt"
    assert all(0 < attempt <= state.attempt for attempt in attempts), (
        "a worker holds an attempt whose number is not from 1 to the request's latest attempt"
    )
    assert state.running is None or state.lease is None, (
        "the request is running on a worker and also has a lease: expected at most one of both"
    )
    assert len(set(state.workers())) == len(attempts), "one worker holds the request twice"
