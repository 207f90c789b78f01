"""Record of one submission of a request to a worker."""

from math import inf

from penstock.router.routing.events import Source, WorkerInfo


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
        # The worker yields by itself after its first tokens, without a Yield command.
        self.yields_after_prefill = yields_after_prefill
        self.started = False  # a token of this submission was accepted
        self.yielding = False  # a Yield command was sent
        self.epoch: int | None = None  # of the KV transfer to this worker; None: not started
        self.source_lost = False  # the last check found the transfer's source lost
        self.runnable_since = inf  # clock time since which the worker can run this; inf: it cannot

    def matches(self, worker: str, attempt: int) -> bool:
        """Return whether a message of `worker` about `attempt` refers to this submission."""
        return self.attempt == attempt and self.worker == worker

    def lease(self, kv_len: int) -> Source:
        """Return the lease of the blocks of positions [0, `kv_len`)."""
        return Source(self.worker, self.info.incarnation, self.attempt, kv_len, self.info.layout)
