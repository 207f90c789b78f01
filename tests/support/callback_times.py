"""Measures the CPU time of every callback that an asyncio event loop runs.

A callback that computes for long delays all other streams of its router; workers may then take the
router for dead. The CPU time of the thread is measured, because wall time depends on the load of
the machine. Garbage collections are not counted, because a test process has far more objects than a
router.

The memory that earlier tests freed is returned to the kernel before measuring begins. Otherwise, a
small block at the end of the heap can keep hundreds of megabytes until any callback frees this
block. This callback then takes 0.15 to 0.3 ms per megabyte, all of it in the kernel.
"""

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage, struct_rusage
from typing import Any

from tests.support.memory import return_free_memory

TESTS = str(Path(__file__).resolve().parents[1])
GRPC_CLIENT = str(Path("grpc", "aio", "_call.py"))
"""The module that serializes the messages of the tests' gRPC clients.

Routers write to workers in coroutines of their own, which are measured.
"""


class CallbackTimes:
    """The callbacks that took longer than `limit_seconds`, except those of the tests themselves.

    The tests themselves run coroutines for start-up, the stub workers and the clients.
    """

    def __init__(self, limit_seconds: float) -> None:
        self.slow: list[str] = []
        self.longest = 0.0
        self._limit = limit_seconds
        self._collecting_since = 0.0
        self._collected = 0.0  # total seconds of garbage collections so far

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure the callbacks of all event loops of this process, until the context ends."""
        original: Callable[[asyncio.Handle], None] = asyncio.Handle._run

        def run(handle: asyncio.Handle) -> None:
            # Read the coroutine now, because a task drops its coroutine when it ends.
            coroutine = _coroutine(handle)
            usage = getrusage(RUSAGE_THREAD)
            began = time.thread_time() - self._collected
            original(handle)
            seconds = time.thread_time() - self._collected - began
            if not _is_of_tests(coroutine):
                self._record(seconds, coroutine or handle, usage)

        return_free_memory()
        setattr(asyncio.Handle, "_run", run)  # noqa: B010 (mypy knows no such method)
        gc.callbacks.append(self._on_collection)
        try:
            yield
        finally:
            gc.callbacks.remove(self._on_collection)
            setattr(asyncio.Handle, "_run", original)  # noqa: B010

    def _record(self, seconds: float, source: object, before: struct_rusage) -> None:
        self.longest = max(self.longest, seconds)
        if seconds > self._limit:
            after = getrusage(RUSAGE_THREAD)
            causes = (
                f"{after.ru_stime - before.ru_stime:.3f} s in the kernel, "
                f"{after.ru_minflt - before.ru_minflt} minor and "
                f"{after.ru_majflt - before.ru_majflt} major page faults, "
                f"{after.ru_nivcsw - before.ru_nivcsw} preemptions"
            )
            self.slow.append(f"{seconds * 1000:.0f} ms ({causes}): {str(source)[:300]}")

    def _on_collection(self, phase: str, info: object) -> None:
        now = time.thread_time()
        if phase == "start":
            self._collecting_since = now
        else:
            self._collected += now - self._collecting_since


def _coroutine(handle: asyncio.Handle) -> Any:
    """Return the coroutine that a callback continues, or None if it is no coroutine's callback."""
    task = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
    return task.get_coro() if isinstance(task, asyncio.Task) else None


def _is_of_tests(coroutine: Any) -> bool:
    code = getattr(coroutine, "cr_code", None)
    return code is not None and (
        code.co_filename.startswith(TESTS)
        or "pytest_asyncio" in code.co_filename
        or code.co_filename.endswith(GRPC_CLIENT)
    )
