"""What a worker has of a request."""

from math import inf

from penstock.router.routing.events import Source, WorkerInfo


class Submission:
    """A submission that a worker has: the one that runs, or the one that is to run next."""

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
        self.yields_after_prefill = (
            yields_after_prefill  # it yields by itself, after its first tokens
        )
        self.started = False  # a token of it was taken
        self.yielding = False  # it was asked to yield
        self.epoch: int | None = None  # of the transfer that it receives, once it said Ready
        self.source_lost = False  # the source of that transfer was gone when last looked at
        self.runnable_since = inf  # when it could begin to compute

    def matches(self, worker: str, attempt: int) -> bool:
        return self.attempt == attempt and self.worker == worker

    def lease(self, kv_len: int) -> Source:
        """The lease of its blocks below that position."""
        return Source(self.worker, self.info.incarnation, self.attempt, kv_len, self.info.layout)
