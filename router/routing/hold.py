"""What a worker has of a request."""

from math import inf

from penstock.router.routing.events import Source, WorkerInfo


class Hold:
    """A submission that a worker has: the one that runs, or the one that is to run next."""

    __slots__ = (
        "attempt",
        "bereft",
        "epoch",
        "info",
        "passes",
        "since",
        "started",
        "worker",
        "yielding",
    )

    def __init__(self, info: WorkerInfo, attempt: int, passes: bool = False) -> None:
        self.info = info
        self.worker = info.worker
        self.attempt = attempt
        self.passes = passes  # it yields by itself, after its first tokens
        self.started = False  # a token of it was taken
        self.yielding = False  # it was asked to yield
        self.epoch: int | None = None  # of the transfer that it receives, once it said Ready
        self.bereft = False  # the source of that transfer was gone when last looked at
        self.since = inf  # when it could begin to compute

    def names(self, worker: str, attempt: int) -> bool:
        return self.attempt == attempt and self.worker == worker

    def keeps(self, kv_len: int) -> Source:
        """The lease of its blocks below that position."""
        return Source(self.worker, self.info.incarnation, self.attempt, kv_len, self.info.layout)
