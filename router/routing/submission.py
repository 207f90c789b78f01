"""Record of one submission of a request to a worker."""

from math import inf

from penstock.router.routing.events import Source, WorkerInfo


class Submission:
    """A submission of a request to a worker: the running one, or the one that runs next."""

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
        # The worker yields without a Yield command, after the first tokens.
        self.yields_after_prefill = yields_after_prefill
        self.started = False  # one of its tokens was accepted
        self.yielding = False  # a Yield command was sent
        self.epoch: int | None = None  # of its incoming KV transfer, from its Ready message
        self.source_lost = False  # the transfer's source was already gone at the last check
        self.runnable_since = inf  # clock time from which the worker can compute it

    def matches(self, worker: str, attempt: int) -> bool:
        """Return whether a message of `worker` about `attempt` refers to this submission."""
        return self.attempt == attempt and self.worker == worker

    def lease(self, kv_len: int) -> Source:
        """Return the lease of the blocks of positions [0, `kv_len`)."""
        return Source(self.worker, self.info.incarnation, self.attempt, kv_len, self.info.layout)
