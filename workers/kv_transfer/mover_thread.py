"""The thread that moves KV: runs the tasks of many transfers in turn; no task may block.

A task is a generator. It yields a condition, and is resumed when the condition is true. On a CPU,
the thread that makes a condition true calls `wake`. On a GPU, CUDA events and operations of NCCL
are polled while a task waits for them.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from penstock.workers.kv_transfer.lanes import REACHED, Waitable

log = logging.getLogger(__name__)

Task: TypeAlias = Generator[Waitable, None, None]

POLL_SECONDS = 50e-6  # interval at which CUDA events and operations of NCCL are polled
LINGER_SECONDS = 1.0  # how long the thread waits for tasks before it ends


@dataclass(frozen=True, slots=True)
class TaskCondition:
    """A condition that is not polled: a task makes it true, or another thread that calls `wake`."""

    ready: Callable[[], bool]


@dataclass(slots=True)
class _Running:
    task: Task
    awaited: Waitable = REACHED
    ended: bool = False

    @property
    def is_polled(self) -> bool:
        return not isinstance(self.awaited, TaskCondition)


class MoverThread:
    """Runs tasks in one thread, which is started when needed and ends when it is idle."""

    def __init__(self, device: torch.device, linger_seconds: float = LINGER_SECONDS) -> None:
        self._device = device
        self._linger_seconds = linger_seconds
        self._polls = device.type == "cuda"
        self._changed = threading.Condition()
        self._new: deque[Task] = deque()
        self._woken = False
        self._thread: threading.Thread | None = None

    @property
    def num_threads(self) -> int:
        """Number of threads: 0 or 1."""
        with self._changed:
            return int(self._thread is not None)

    def run(self, task: Task) -> None:
        """Queue a task; tasks start in the order of the calls. Callable from any thread."""
        with self._changed:
            self._new.append(task)
            self._woken = True
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-mover", daemon=True)
                self._thread.start()

    def wake(self) -> None:
        """Check all tasks again, because one may have become ready. Callable from any thread."""
        with self._changed:
            self._woken = True
            self._changed.notify()

    def _run(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        running: list[_Running] = []
        with torch.inference_mode():
            while self._wait(running):
                while self._new:
                    running.append(_Running(self._new.popleft()))
                # Repeat: a task may free a buffer for which an earlier task waits.
                while any([_advance(each) for each in running]):
                    running = [each for each in running if not each.ended]

    def _wait(self, running: Sequence[_Running]) -> bool:
        """Wait until a task may be ready; return False if the thread ends."""
        with self._changed:
            if not self._woken:
                polls = self._polls and any(each.is_polled for each in running)
                self._changed.wait(POLL_SECONDS if polls else self._linger_seconds)
            if not (self._woken or running):
                self._thread = None
                return False
            self._woken = False
            return True


def _advance(running: _Running) -> bool:
    """Resume a task repeatedly while it is ready; return whether it was resumed."""
    moved = False
    try:
        while True:
            try:
                is_ready = running.awaited.ready()
            except Exception as error:  # raise the error inside the task, which then reports it
                running.awaited, moved = running.task.throw(error), True
                continue
            if not is_ready:
                break
            moved = True
            running.awaited = next(running.task)
    except StopIteration:
        running.ended = True
    except Exception:
        running.ended = True
        log.exception("a task of the KV mover failed")
    return moved
