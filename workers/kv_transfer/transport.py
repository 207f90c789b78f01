"""Rank pairs: a two-rank communicator (gloo or NCCL) and the thread that sends and receives.

The two ranks find each other through a rendezvous store that is mirrored over the authenticated
control channel. The store therefore needs no port, and no other process can join.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from penstock.workers.parallel.communicator import (
    Communicator,
    backend_for,
    connect,
    first_sentence,
)

SOURCE, DESTINATION = 0, 1
"""Rank numbers within a pair's communicator."""

T = TypeVar("T")


class PairBroken(RuntimeError):
    """The connection to the other side is closed, failed or timed out."""


class MirrorStore(Store):
    """A two-party store: `publish` sends each value set here to the other side's `receive`.

    `publish` is called in the thread that sets the value. `close` ends all waits.
    """

    def __init__(self, publish: Callable[[str, bytes], None], seconds: float) -> None:
        super().__init__()
        self._publish = publish
        self._seconds = seconds
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def receive(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # Methods of `Store` that communicators call.

    def set(self, key: str, value: bytes | str) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.receive(key, data)
        self._publish(key, data)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self.check(keys), seconds)
            if not self.check(keys):
                raise PairBroken(
                    f"the other side did not set {', '.join(keys)} within {seconds:g} s"
                )

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


class RankPair:
    """One rank's endpoint of a directed pair. Its operations run in order, in its own thread.

    Both sides must queue operations in the same order; the credits on the control channel ensure
    this. An operation that fails or takes longer than `seconds` breaks the pair permanently.
    """

    def __init__(
        self, rank: int, store: MirrorStore, device: torch.device, host: str, seconds: float
    ) -> None:
        self._rank = rank
        self.store = store
        self._device = device
        self._seconds = seconds
        self._group: Communicator | None = None
        self._closed = False
        self._released: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pair")
        self._connected = self._thread.submit(self._connect, host)

    def connected(self) -> Future[None]:
        """Return the future of the connection; it raises `PairBroken` if connecting failed."""
        return self._connected

    def run(self, work: Callable[[], T]) -> Future[T]:
        """Queue `work` for the pair's thread; the future of a closed pair raises `PairBroken`."""

        def guarded() -> T:
            with torch.inference_mode():
                return work()

        if self._closed:
            refused: Future[T] = Future()
            refused.set_exception(PairBroken("the pair is closed"))
            return refused
        return self._thread.submit(guarded)

    def send(self, data: torch.Tensor) -> None:
        """Send contiguous `data`; return when it has been sent. Call this in the pair's thread."""
        self._operate(lambda group: group.send([data], DESTINATION, 0))

    def receive(self, data: torch.Tensor) -> None:
        """Receive into contiguous `data` and wait until it is filled. Call in the pair's thread."""
        self._operate(lambda group: group.recv([data], SOURCE, 0))

    def close(self) -> Future[None]:
        """Close the pair without waiting, from any thread.

        Return a future that is done when all queued work has finished.
        """
        if self._released is None:
            self._closed = True
            self.store.close()
            # Use a separate thread, because `abort` may block until a running operation has ended.
            threading.Thread(target=self._abort, daemon=True, name="pair-close").start()
            self._released = self._thread.submit(self._release)
            self._thread.shutdown(wait=False)
        return self._released

    def _connect(self, host: str) -> None:
        started = time.monotonic()
        backend = backend_for(self._device)
        try:
            self._group = connect(backend, self.store, self._rank, 2, host, self._seconds)
        except PairBroken:
            raise
        except RuntimeError as error:
            waited = time.monotonic() - started
            raise PairBroken(
                f"could not connect over {backend} in {waited:.1f} s: {first_sentence(error)}"
            ) from error

    def _operate(self, start: Callable[[Communicator], dist.Work]) -> None:
        if self._group is None or self._closed:
            raise PairBroken("the pair is closed")
        try:
            start(self._group).wait(timedelta(seconds=self._seconds))
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise PairBroken(first_sentence(error)) from error

    def _abort(self) -> None:
        group = self._group
        if group is not None:
            group.abort()

    def _release(self) -> None:
        self._group = None
