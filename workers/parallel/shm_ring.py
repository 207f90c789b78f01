"""A ring buffer in shared memory with one writer; all readers on the node read every message.

The memory is an anonymous file that readers open through the writer's /proc entry (Linux), so
nothing is left behind when processes are killed. Waiting processes sleep on a futex.
"""

import ctypes
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from penstock.workers.parallel.collectives import RankLost

_LINE = 64  # bytes of a cache line; each counter has its own line, to avoid false sharing
_WAIT, _WAKE = 0, 1
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine())
_CHECK_SECONDS = 0.5  # interval at which a waiting process checks that the other process is alive
_SLEEP_SECONDS = 50e-6

_libc = ctypes.CDLL(None, use_errno=True)
_fence = threading.Lock()  # used as a memory fence: acquiring the lock orders memory writes


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class ShmRing:
    """The shared memory of a ring, and its layout.

    First comes the counter of written messages, then one counter of read messages per reader, each
    in its own cache line. The slots follow; a slot has 8 bytes for the length, then the message.
    Counters wrap at 2³².
    """

    def __init__(self, file: int, num_readers: int, num_slots: int, slot_bytes: int) -> None:
        self.num_readers, self.num_slots, self.slot_bytes = num_readers, num_slots, slot_bytes
        self._head = _LINE * (1 + num_readers)
        size = self._head + num_slots * (8 + slot_bytes)
        if os.fstat(file).st_size == 0:
            os.ftruncate(file, size)
        self.memory = mmap.mmap(file, size)
        words: npt.NDArray[np.uint32] = np.frombuffer(self.memory, np.uint32, self._head // 4)
        self._words = words
        self._address = words.ctypes.data

    def written(self) -> int:
        return int(self._words[0])

    def read(self, reader: int) -> int:
        return int(self._words[(1 + reader) * _LINE // 4])

    def count_written(self, number: int) -> None:
        with _fence:
            self._words[0] = number
        self._wake()

    def count_read(self, reader: int, number: int) -> None:
        with _fence:
            self._words[(1 + reader) * _LINE // 4] = number

    def put(self, number: int, message: bytes) -> None:
        start = self._slot(number)
        self.memory[start : start + 8] = len(message).to_bytes(8, "little")
        self.memory[start + 8 : start + 8 + len(message)] = message

    def get(self, number: int) -> bytes:
        start = self._slot(number)
        size = int.from_bytes(self.memory[start : start + 8], "little")
        return self.memory[start + 8 : start + 8 + size]

    def wait_written(self, number: int) -> None:
        """Wait until the number of written messages is not `number`, at most `_CHECK_SECONDS`."""
        if _FUTEX is None:
            time.sleep(_SLEEP_SECONDS)
            return
        timeout = _TimeSpec(0, int(_CHECK_SECONDS * 1e9))
        _libc.syscall(
            ctypes.c_long(_FUTEX),
            ctypes.c_void_p(self._address),
            ctypes.c_int(_WAIT),
            ctypes.c_uint32(number % (1 << 32)),
            ctypes.byref(timeout),
        )

    def _wake(self) -> None:
        if _FUTEX is not None:
            _libc.syscall(
                ctypes.c_long(_FUTEX),
                ctypes.c_void_p(self._address),
                ctypes.c_int(_WAKE),
                ctypes.c_int(self.num_readers),
            )

    def _slot(self, number: int) -> int:
        return self._head + number % self.num_slots * (8 + self.slot_bytes)


class ShmRingWriter:
    """Writer of a ring; readers on this node open it with `path` and `shape`."""

    def __init__(self, num_readers: int, num_slots: int, slot_bytes: int, seconds: float) -> None:
        self._file = os.memfd_create("penstock-plans")
        self._ring = ShmRing(self._file, num_readers, num_slots, slot_bytes)
        self._seconds = seconds
        self._number = 0
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.shape = (num_readers, num_slots, slot_bytes)

    def write(self, message: bytes) -> None:
        """Write a message for all readers; wait while the ring is full.

        Raises:
            ValueError: The message is larger than a slot.
            RankLost: A reader did not free a slot within the timeout.
        """
        ring = self._ring
        if len(message) > ring.slot_bytes:
            raise ValueError(
                f"internal error: a message to the other ranks has {len(message)} bytes, but the "
                f"shared-memory ring accepts at most {ring.slot_bytes}"
            )
        deadline = time.monotonic() + self._seconds
        while (self._number - self._slowest()) >= ring.num_slots:
            if time.monotonic() > deadline:
                raise RankLost(f"a rank has not read its next step plan for {self._seconds:g} s")
            time.sleep(_SLEEP_SECONDS)
        ring.put(self._number, message)
        self._number += 1
        ring.count_written(self._number % (1 << 32))

    def close(self) -> None:
        """Close the file; readers that have opened it can still use the ring."""
        os.close(self._file)

    def _slowest(self) -> int:
        """Return how many messages the slowest reader has read (counters wrap at 2³²)."""
        ring, whole = self._ring, 1 << 32
        behind = ((self._number - ring.read(i)) % whole for i in range(ring.num_readers))
        return self._number - max(behind)


class ShmRingReader:
    """One reader of a ring. Raises OSError if `path` is on another node or is gone."""

    def __init__(
        self, path: str, shape: tuple[int, int, int], reader: int, is_alive: Callable[[], bool]
    ) -> None:
        file = os.open(path, os.O_RDWR)
        try:
            self._ring = ShmRing(file, *shape)
        finally:
            os.close(file)
        self._reader = reader
        self._number = 0
        self._is_alive = is_alive

    def read(self) -> bytes:
        """Wait for the next message and return it; raise `RankLost` if the writer has exited."""
        ring = self._ring
        while ring.written() == self._number:
            ring.wait_written(self._number)
            if ring.written() == self._number and not self._is_alive():
                raise RankLost("the process of rank 0 has exited")
        with _fence:
            message = ring.get(self._number)
        self._number = (self._number + 1) % (1 << 32)
        ring.count_read(self._reader, self._number)
        return message
