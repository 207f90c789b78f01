"""A ring buffer in shared memory with one writer; all readers on the node read every message.

The memory has no name in the file system. Readers open it through the writer's process (Linux), so
nothing is left behind when processes are killed. A process that waits sleeps in the kernel (futex).
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

from penstock.workers.parallel.groups import RankLost

_LINE = 64  # bytes: what two processes write at the same time lies in cache lines of its own
_WAIT, _WAKE = 0, 1
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine())
_CHECK_SECONDS = 0.5  # between looks whether the others still live
_SLEEP_SECONDS = 50e-6

_libc = ctypes.CDLL(None, use_errno=True)
_fence = threading.Lock()  # taking it orders what was written before and after


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class ShmRing:
    """The memory, as both sides see it.

    A counter of messages written (one cache line), one of messages read a reader, then the slots:
    each a length (8 bytes) and the message.
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
        """Until more than `number` messages are written, or for a while."""
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
    """The writing side; `path` and `shape` are what a reader on this node opens it by."""

    def __init__(self, num_readers: int, num_slots: int, slot_bytes: int, seconds: float) -> None:
        self._file = os.memfd_create("penstock-plans")
        self._ring = ShmRing(self._file, num_readers, num_slots, slot_bytes)
        self._seconds = seconds
        self._number = 0
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.shape = (num_readers, num_slots, slot_bytes)

    def write(self, message: bytes) -> None:
        """To all readers. ValueError if it is too long; `RankLost` if a reader falls behind."""
        ring = self._ring
        if len(message) > ring.slot_bytes:
            raise ValueError(f"a message of {len(message)} bytes, and {ring.slot_bytes} is most")
        deadline = time.monotonic() + self._seconds
        while (self._number - self._slowest()) >= ring.num_slots:
            if time.monotonic() > deadline:
                raise RankLost(f"a rank took no step plan for {self._seconds:g} s")
            time.sleep(_SLEEP_SECONDS)
        ring.put(self._number, message)
        self._number += 1
        ring.count_written(self._number % (1 << 32))

    def close(self) -> None:
        """Readers that have opened it keep it."""
        os.close(self._file)

    def _slowest(self) -> int:
        """Messages that all have read; counters begin anew at 2³²."""
        ring, whole = self._ring, 1 << 32
        behind = ((self._number - ring.read(i)) % whole for i in range(ring.num_readers))
        return self._number - max(behind)


class ShmRingReader:
    """One reading side. OSError where `path` is on another node, or its writer has gone."""

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
        """The next message; waits for it. `RankLost` if the writer has gone."""
        ring = self._ring
        while ring.written() == self._number:
            ring.wait_written(self._number)
            if ring.written() == self._number and not self._is_alive():
                raise RankLost("the leading rank is gone")
        with _fence:
            message = ring.get(self._number)
        self._number = (self._number + 1) % (1 << 32)
        ring.count_read(self._reader, self._number)
        return message
