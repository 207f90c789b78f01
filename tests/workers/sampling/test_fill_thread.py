"""FillThread: results and exceptions of jobs, in their order, and the end of the thread."""

import gc
import threading

import pytest

from penstock.workers.sampling.fill_thread import FillThread


def test_results_and_exceptions_reach_the_thread_that_waits() -> None:
    thread: FillThread[int] = FillThread()
    order: list[int] = []

    def job(number: int) -> int:
        order.append(number)
        return 10 // number

    results = [thread.start(lambda number=number: job(number)) for number in (5, 0, 2)]  # type: ignore[misc]
    assert results[2].wait() == 5
    assert results[0].wait() == 2
    with pytest.raises(ZeroDivisionError):
        results[1].wait()
    assert order == [5, 0, 2]


def test_thread_ends_with_its_object() -> None:
    thread: FillThread[threading.Thread] = FillThread()
    own = thread.start(threading.current_thread).wait()
    assert own.is_alive()
    del thread
    gc.collect()
    own.join(timeout=60)
    assert not own.is_alive()
