"""The thread barrier: no thread passes it early or waits for a thread that never runs."""

import resource
import sys
from functools import cache
from typing import Any

import numpy as np
import pytest

from penstock.kernels.cpu_common.numba_runtime import configure_numba, use_threads

ROUNDS = 300


@cache
def loops() -> Any:
    configure_numba()
    import numba

    from penstock.kernels.cpu_common.thread_barrier import arrive, backoff, join, phase_done

    @numba.njit(parallel=True, nogil=True)
    def rounds(shared: Any, written: Any, errors: Any, num_threads: int) -> None:
        """In each round, write a value, pass the barrier, and check the values of all threads."""
        for _thread in numba.prange(num_threads):
            index, count = join(shared, num_threads)
            for number in range(len(written) if index >= 0 else 0):
                written[number, index] = number + 1
                arrive(shared)
                spins = 0
                while not phase_done(shared, count, number + 1):
                    backoff(spins)
                    spins += 1
                for other in range(count):
                    errors[index] += written[number, other] != number + 1

    @numba.njit
    def join_repeatedly(shared: Any, num_threads: int, times: int) -> list[tuple[int, int]]:
        return [join(shared, num_threads) for _ in range(times)]

    @numba.njit
    def wait(spins: int) -> None:
        backoff(spins)

    return rounds, join_repeatedly, wait


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_threads_see_all_writes_made_before_the_barrier(num_threads: int) -> None:
    from penstock.kernels.cpu_common.thread_barrier import BARRIER_WORDS

    num_threads = use_threads(num_threads)
    written, errors = np.zeros((ROUNDS, num_threads), np.int64), np.zeros(num_threads, np.int64)
    for _ in range(20):
        written[:] = 0
        loops()[0](np.zeros(BARRIER_WORDS, np.int64), written, errors, num_threads)
        assert not errors.any()
        # A thread takes part either in all rounds or, if it joined too late, in none.
        assert {column.all() for column in written.T} <= {True, False}
        assert written[:, 0].all()
        assert all(column.all() or not column.any() for column in written.T)


@pytest.mark.skipif(sys.platform != "linux", reason="RUSAGE_THREAD needs Linux")
def test_a_long_wait_sleeps_between_polls() -> None:
    configure_numba()
    from penstock.kernels.cpu_common import thread_barrier

    code: Any = thread_barrier
    wait = loops()[2]
    for spins in range(
        2 * code._SPINS_BEFORE_SLEEP, 2 * code._SPINS_BEFORE_SLEEP + 100 * code._SPINS_BEFORE_YIELD
    ):
        if spins % code._SPINS_BEFORE_YIELD == code._SPINS_BEFORE_YIELD - 1:
            before = num_sleeps()
            wait(spins)
            assert num_sleeps() > before


def num_sleeps() -> int:
    """Return the number of voluntary context switches of this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def test_a_thread_that_joins_without_the_others_starts_after_a_limit() -> None:
    """One thread joins three times: it first starts alone, and the later attempts are refused."""
    from penstock.kernels.cpu_common.thread_barrier import BARRIER_WORDS

    shared = np.zeros(BARRIER_WORDS, np.int64)
    assert list(loops()[1](shared, 3, 3)) == [(0, 1), (-1, 0), (-1, 0)]


def test_a_complete_team_starts_without_waiting() -> None:
    from penstock.kernels.cpu_common.thread_barrier import BARRIER_WORDS

    assert list(loops()[1](np.zeros(BARRIER_WORDS, np.int64), 1, 2)) == [(0, 1), (-1, 0)]
