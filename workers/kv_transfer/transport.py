"""Rank pairs: a two-rank communicator (gloo or NCCL), and its operations.

The mover thread starts operations, which do not block it. NCCL's operations are polled. gloo's
cannot be polled, so a thread of each pair waits for them.

The two ranks find each other through a rendezvous store that is mirrored over the authenticated
control channel. The store therefore needs no port, and no other process can join.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from penstock.workers.parallel.communicator import (
    Communicator,
    backend_for,
    connect,
    first_sentence,
)

log = logging.getLogger(__name__)

SOURCE, DESTINATION = 0, 1
"""Rank numbers within a pair's communicator."""


class PairBroken(RuntimeError):
    """The connection to the peer rank is closed, has failed or has timed out."""


class MirrorStore(Store):
    """A rendezvous store that is mirrored on two sides.

    For each value set here, `publish` is called in the same thread. `publish` must send the value
    to the other side, which passes it to `receive` of its own store. `close` ends all waits.
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

    # The following methods override those of `Store`; communicators call them.

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
                missing = f"the peer rank did not publish {', '.join(keys)}"
                when = "before the connection was closed" if self._closed else f"in {seconds:g} s"
                raise PairBroken(f"{missing} {when}")

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


class Operation:
    """A send or receive in progress.

    Args:
        polls: True: `ready` polls the backend. False: the pair's thread calls `wait_for_backend`.
        is_over: Returns True if the pair has ended; the operation then fails if it has not
            completed.
    """

    def __init__(
        self, work: dist.Work, seconds: float, polls: bool, is_over: Callable[[], bool]
    ) -> None:
        self._work = work
        self._seconds = seconds
        self._polls = polls
        self._is_over = is_over
        self._deadline = time.monotonic() + seconds
        self._error = ""
        self._done = False

    def ready(self) -> bool:
        """Return whether the operation has completed or failed."""
        if not self._done and self._is_over():
            self._fail("the connection of this pair of ranks is closed")
        elif not self._done and self._polls:
            self._poll()
        return self._done

    def check(self) -> None:
        """Raise `PairBroken` if the operation has failed. Call this after `ready` is True."""
        if self._error:
            raise PairBroken(self._error)

    def wait_for_backend(self) -> None:
        """Wait until the operation has completed or failed; at the timeout, it fails."""
        try:
            self._work.wait(timedelta(seconds=self._seconds))
        except RuntimeError as error:
            self._error = first_sentence(error)
        self._done = True

    def _poll(self) -> None:
        try:
            completed = self._work.is_completed()
        except RuntimeError as error:
            self._fail(first_sentence(error))
            return
        if completed:
            # returns immediately; records the error if the operation failed
            self.wait_for_backend()
        elif time.monotonic() >= self._deadline:
            self._fail(
                f"Timed out after {self._seconds:g} s: the peer did not transfer the message"
            )

    def _fail(self, reason: str) -> None:
        self._error, self._done = reason, True


class RankPair:
    """One rank's endpoint of a directed pair.

    Both sides must start operations in the same order; the credits on the control channel ensure
    this. An operation that fails or takes longer than `seconds` breaks the pair permanently.

    Args:
        on_progress: Called from any thread when an operation or the pair has changed its state.
    """

    def __init__(
        self,
        rank: int,
        store: MirrorStore,
        device: torch.device,
        host: str,
        seconds: float,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self.store = store
        self._rank = rank
        self._device = device
        self._seconds = seconds
        self._on_progress = on_progress
        self._polls = backend_for(device) == "nccl"
        self._group: Communicator | None = None
        self._closed = threading.Event()
        self._aborted = threading.Event()
        self._kept: list[torch.Tensor] = []
        self._waiting: SimpleQueue[Operation | None] = SimpleQueue()
        self._connected: Future[None] = Future()
        self._released: Future[None] = Future()
        thread = threading.Thread(target=self._run, args=(host,), daemon=True, name="pair")
        thread.start()

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def connected(self) -> Future[None]:
        """Return the future of the connection; it raises `PairBroken` if connecting failed."""
        return self._connected

    def send(self, data: torch.Tensor) -> Operation:
        """Start to send contiguous `data`, which must not change until the operation is ready.

        With NCCL, the data is read after all work in the current stream. Raises `PairBroken`.
        """
        return self._start(lambda group: group.send([data], DESTINATION, 0))

    def receive(self, data: torch.Tensor) -> Operation:
        """Start to receive into contiguous `data`. Raises `PairBroken`."""
        return self._start(lambda group: group.recv([data], SOURCE, 0))

    def keep(self, data: torch.Tensor) -> None:
        """Keep the memory of a failed operation until the pair is released.

        The backend may still write into this memory.
        """
        self._kept.append(data)

    def close(self) -> Future[None]:
        """Close the pair without waiting, from any thread.

        Return a future that is done when all operations have ended and the communicator is gone.
        """
        if not self._closed.is_set():
            self._closed.set()
            self.store.close()
            self._on_progress()
            # Use a separate thread, because `abort` may block until a running operation has ended.
            threading.Thread(target=self._abort, daemon=True, name="pair-close").start()
        return self._released

    def _run(self, host: str) -> None:
        """Connect; then wait for operations until the pair is closed."""
        try:
            self._connect(host)
        except PairBroken as error:
            self._connected.set_exception(error)
        else:
            self._connected.set_result(None)
        self._on_progress()
        while (operation := self._waiting.get()) is not None:
            operation.wait_for_backend()
            self._on_progress()
        group, self._group = self._group, None
        if group is not None and self._polls:
            _try_to_abort(group)  # needed if `close` ran before the communicator was connected
        del group
        self._kept.clear()
        self._released.set_result(None)
        self._on_progress()

    def _connect(self, host: str) -> None:
        started = time.monotonic()
        backend = backend_for(self._device)
        try:
            self._group = connect(backend, self.store, self._rank, 2, host, self._seconds, True)
            self._greet(self._group)
        except PairBroken:
            raise
        except RuntimeError as error:
            waited = time.monotonic() - started
            raise PairBroken(
                f"could not connect to the peer rank over {backend} in {waited:.1f} s: "
                f"{first_sentence(error)}"
            ) from error

    def _greet(self, group: Communicator) -> None:
        """Transfer a byte, because NCCL connects and allocates memory at the first operation."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._device)
        if self._rank == SOURCE:
            work = group.send([byte], DESTINATION, 0)
        else:
            work = group.recv([byte], SOURCE, 0)
        work.wait(timedelta(seconds=self._seconds))

    def _start(self, start: Callable[[Communicator], dist.Work]) -> Operation:
        group = self._group
        if group is None or self.closed:
            raise PairBroken("the connection of this pair of ranks is closed")
        try:
            work = start(group)
        except RuntimeError as error:
            raise PairBroken(first_sentence(error)) from error
        is_over = self._aborted.is_set if self._polls else self._released.done
        operation = Operation(work, self._seconds, self._polls, is_over)
        if not self._polls:
            self._waiting.put(operation)
        return operation

    def _abort(self) -> None:
        group = self._group
        if group is not None:
            _try_to_abort(group)
        self._aborted.set()
        self._on_progress()
        self._waiting.put(None)


def _try_to_abort(group: Communicator) -> None:
    """Abort a communicator. Log an error instead of raising it, so that the pair is released."""
    try:
        group.abort()
    except Exception:
        log.exception("could not abort the connection of a pair of ranks")
