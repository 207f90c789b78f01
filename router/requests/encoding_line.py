"""The queue of texts that wait for the tokenizer's threads, which tenants share fairly."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from penstock.router.errors import shutting_down
from penstock.router.requests.fair_line import FairLine

T = TypeVar("T")

NUM_THREADS = 2
"""Number of threads. A tenant uses one at a time, so its long text leaves one to the others."""


@dataclass(slots=True, eq=False)
class _Job:
    work: Callable[[], Any]
    done: asyncio.Future[Any]


class EncodingLine:
    """Encodes texts in threads, in the order of a `FairLine`.

    If the caller of `run` is cancelled before its job has begun, the job does not run.

    Args:
        max_chars: maximum number of characters of all waiting texts. One tenant may use a quarter
            of them.
    """

    def __init__(self, max_chars: int) -> None:
        self._line: FairLine[_Job] = FairLine(max_chars, NUM_THREADS)
        self._executor = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenizer")
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Number of jobs that have not begun."""
        return self._line.num_waiting

    async def run(self, tenant: str, num_chars: int, work: Callable[[], T]) -> T:
        """Run `work` in a thread when the tenant's turn comes; return its result.

        Raises:
            ServingError: OVERLOADED if too many characters wait already; UNAVAILABLE if the line is
                closed before the job begins.
        """
        if self._is_closed:
            raise shutting_down()
        job = _Job(work, asyncio.get_running_loop().create_future())
        self._line.add(tenant, job, num_chars)
        self._start()
        try:
            result: T = await job.done
            return result
        except asyncio.CancelledError:
            self._line.remove(tenant, job)
            raise

    def close(self) -> None:
        """Stop the threads; callers whose jobs have not begun get UNAVAILABLE."""
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)
        for job in self._line.clear():
            _refuse(job)

    def _start(self) -> None:
        """Begin jobs while a thread is free and a waiting job's tenant has no running job."""
        while (begun := self._line.take(range(NUM_THREADS))) is not None:
            slot, job = begun
            running = asyncio.get_running_loop().run_in_executor(self._executor, job.work)
            running.add_done_callback(partial(self._ended, slot, job))

    def _ended(self, slot: int, job: _Job, ran: "asyncio.Future[Any]") -> None:
        self._line.end(slot)
        if ran.cancelled():
            _refuse(job)
        elif (error := ran.exception()) is not None:
            if not job.done.done():
                job.done.set_exception(error)
        elif not job.done.done():
            job.done.set_result(ran.result())
        self._start()


def _refuse(job: _Job) -> None:
    if not job.done.done():
        job.done.set_exception(shutting_down())
