"""The submissions of a request to workers, and the lease of its KV blocks at a worker."""

from math import inf

from penstock.router.routing.events import (
    Command,
    DeliverPrompt,
    Drop,
    Request,
    Source,
    Submit,
    WorkerInfo,
    Yield,
)
from penstock.router.routing.token_log import TokenLog


class Submission:
    """One submission of a request to a worker, which runs the request now or is to run it next."""

    __slots__ = (
        "attempt",
        "epoch",
        "info",
        "runnable_since",
        "source_lost",
        "started",
        "worker",
        "yielding",
        "yields_after_prefill",
    )

    def __init__(self, info: WorkerInfo, attempt: int, yields_after_prefill: bool = False) -> None:
        self.info = info
        self.worker = info.worker
        self.attempt = attempt
        # Whether the worker yields after its first new tokens by itself, without a Yield command.
        self.yields_after_prefill = yields_after_prefill
        self.started = False  # whether a token of this submission was accepted
        self.yielding = False  # whether a Yield command was sent
        # Epoch of the KV transfer to this worker, or None before the transfer.
        self.epoch: int | None = None
        self.source_lost = False  # whether the last check found that the transfer's source is lost
        # Clock time from which the worker can run this submission; infinite if it cannot.
        self.runnable_since = inf

    def matches(self, worker: str, attempt: int) -> bool:
        """Return whether a message of `worker` about `attempt` refers to this submission."""
        return self.attempt == attempt and self.worker == worker

    def lease(self, kv_len: int) -> Source:
        """Return the lease of the blocks of positions [0, `kv_len`) at the submission's worker."""
        return Source(self.worker, self.info.incarnation, self.attempt, kv_len, self.info.layout)


class Submissions:
    """The workers of one request, and the commands that change them.

    `running` is the submission to the worker that runs the request. `lease` describes the KV blocks
    that a worker keeps after it has yielded. `pending` is the submission to the next worker. If
    both `running` and `pending` are set, a live migration is in progress. The running worker then
    continues until the next worker is Ready.
    """

    __slots__ = (
        "attempt",
        "lease",
        "num_cached",
        "pending",
        "request",
        "running",
        "token_log",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.token_log = TokenLog(request)
        self.attempt = 0  # attempt number of the last submission
        self.running: Submission | None = None
        self.pending: Submission | None = None
        self.lease: Source | None = None
        self.num_cached: int | None = None  # prompt tokens that the first worker found in its cache

    def record_cached(self, worker: str, attempt: int, num_tokens: int, out: list[Command]) -> None:
        """Record and deliver the number of prompt tokens that the first worker had cached.

        Later numbers are ignored, because they include blocks that this request itself has
        computed. A worker cannot have cached more tokens than the prompt has.
        """
        is_held = self._is_running(worker, attempt) or self._is_pending(worker, attempt)
        if is_held and self.num_cached is None:
            self.num_cached = min(num_tokens, len(self.request.prompt))
            out.append(DeliverPrompt(self.request.id, num_cached=self.num_cached))

    def is_receiving(self, worker: str) -> bool:
        """Whether a KV transfer of this request to `worker` is in progress."""
        hold = self.pending
        return hold is not None and hold.worker == worker and hold.epoch is not None

    @property
    def computing(self) -> Submission | None:
        """The submission that its worker can compute now, or None during a KV transfer."""
        if self.running is not None or self.pending is None or self.pending.epoch is None:
            return self.running or self.pending
        return None

    def update_runnable(self, now: float) -> None:
        """Update `runnable_since` of `running` and `pending`.

        Must be called after every change of state.
        """
        for hold in (self.running, self.pending):
            if hold is not None:
                hold.runnable_since = (
                    min(hold.runnable_since, now) if hold is self.computing else inf
                )

    def workers(self) -> list[str]:
        """Return the workers that run the request, will run it or keep its KV blocks."""
        held = [hold.worker for hold in (self.running, self.pending) if hold is not None]
        return held if self.lease is None else [*held, self.lease.worker]

    def _is_running(self, worker: str, attempt: int) -> bool:
        return self.running is not None and self.running.matches(worker, attempt)

    def _is_pending(self, worker: str, attempt: int) -> bool:
        return self.pending is not None and self.pending.matches(worker, attempt)

    # -------------------------------------------------------------- commands

    def assign(self, info: WorkerInfo, yield_after: int, out: list[Command]) -> None:
        """Submit the request to a worker.

        The lease becomes the source of KV blocks if the worker can use its blocks.
        """
        lease = self.lease
        if lease and (lease.worker == info.worker or lease.layout != info.layout):
            self._drop_lease(out)  # this worker has the blocks already, or cannot use them
        hold = self._submit(info, self.lease, yield_after, out)
        if self.lease is None:
            self.running = hold
        else:
            self.pending = hold

    def request_yield(self, out: list[Command]) -> None:
        """Send Yield to the running worker, unless Yield was already sent."""
        if self.running is not None and not self.running.yielding:
            self.running.yielding = True
            out.append(Yield(self.running.worker, self.request.id, self.running.attempt))

    def cancel_pending(self, out: list[Command]) -> None:
        """Drop the request at its pending worker."""
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

    def _promote_pending(self, out: list[Command]) -> None:
        self.running, self.pending = self.pending, None
        self._drop_lease(out)

    def _drop_lease(self, out: list[Command]) -> None:
        if self.lease is not None:
            out.append(Drop(self.lease.worker, self.request.id, self.lease.attempt))
            self.lease = None
