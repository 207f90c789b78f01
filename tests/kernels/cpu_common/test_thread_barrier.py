"""Threads that join and meet: none goes on too early, none waits for one that is not there."""

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
    def rounds(shared: Any, written: Any, wrong: Any, asked: int) -> None:
        """In every round each writes, and then reads what all have written in it."""
        for _thread in numba.prange(asked):
            me, count = join(shared, asked)
            for number in range(len(written) if me >= 0 else 0):
                written[number, me] = number + 1
                arrive(shared)
                looks = 0
                while not phase_done(shared, count, number + 1):
                    backoff(looks)
                    looks += 1
                for other in range(count):
                    wrong[me] += written[number, other] != number + 1

    @numba.njit
    def join_in_turns(shared: Any, asked: int, times: int) -> list[tuple[int, int]]:
        return [join(shared, asked) for _ in range(times)]

    @numba.njit
    def wait(looks: int) -> None:
        backoff(looks)

    return rounds, join_in_turns, wait


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_all_see_what_all_have_written(asked: int) -> None:
    from penstock.kernels.cpu_common.thread_barrier import BARRIER_WORDS

    asked = use_threads(asked)
    written, wrong = np.zeros((ROUNDS, asked), np.int64), np.zeros(asked, np.int64)
    for _ in range(20):
        written[:] = 0
        loops()[0](np.zeros(BARRIER_WORDS, np.int64), written, wrong, asked)
        assert not wrong.any()
        # Whoever came in time did every round.
        assert {column.all() for column in written.T} <= {True, False}
        assert written[:, 0].all()
        assert all(column.all() or not column.any() for column in written.T)


@pytest.mark.skipif(sys.platform != "linux", reason="counts of one thread are Linux's")
def test_who_waits_long_sleeps_between_looks() -> None:
    configure_numba()
    from penstock.kernels.cpu_common import thread_barrier

    code: Any = thread_barrier
    wait = loops()[2]
    for looks in range(
        2 * code._SPINS_BEFORE_SLEEP, 2 * code._SPINS_BEFORE_SLEEP + 100 * code._SPINS_BEFORE_YIELD
    ):
        if looks % code._SPINS_BEFORE_YIELD == code._SPINS_BEFORE_YIELD - 1:
            before = num_sleeps()
            wait(looks)
            assert num_sleeps() > before


def num_sleeps() -> int:
    """How often this thread has given its core up to wait for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


def test_who_is_there_does_not_wait_for_ever() -> None:
    """One thread that takes all turns: in its first it is alone, in the others too late."""
    from penstock.kernels.cpu_common.thread_barrier import BARRIER_WORDS

    shared = np.zeros(BARRIER_WORDS, np.int64)
    assert list(loops()[1](shared, 3, 3)) == [(0, 1), (-1, 0), (-1, 0)]


def test_as_many_as_were_asked_for_are_let_in_at_once() -> None:
    from penstock.kernels.cpu_common.thread_barrier import BARRIER_WORDS

    assert list(loops()[1](np.zeros(BARRIER_WORDS, np.int64), 1, 2)) == [(0, 1), (-1, 0)]
