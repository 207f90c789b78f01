"""The fixture of all router tests finds callbacks that hold the event loop."""

import asyncio
import ctypes
import gc
import time
from collections.abc import Callable

from tests.support.callback_times import CallbackTimes


def compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


async def run_callbacks(*callbacks: Callable[[], object]) -> None:
    loop = asyncio.get_running_loop()
    for callback in callbacks:
        loop.call_soon(callback)
    await asyncio.sleep(0)


async def test_callback_that_computes_for_too_long_is_found() -> None:
    times = CallbackTimes(0.005)
    with times.measuring():
        await run_callbacks(lambda: compute(0.01), lambda: compute(0.0001))
    assert len(times.slow) == 1
    assert 0.01 <= times.longest < 0.05


async def test_waiting_and_garbage_collections_are_not_counted() -> None:
    times = CallbackTimes(0.005)
    with times.measuring():
        await run_callbacks(lambda: time.sleep(0.02), gc.collect)
    assert times.slow == []


async def test_coroutines_of_the_tests_are_not_counted() -> None:
    async def compute_in_task() -> None:
        compute(0.01)

    times = CallbackTimes(0.005)
    with times.measuring():
        await asyncio.create_task(compute_in_task())
    assert times.slow == []


async def test_memory_that_was_freed_before_is_not_counted() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    blocks = [ctypes.c_void_p(libc.malloc(65_000)) for _ in range(2_000)]
    for block in blocks:
        libc.memset(block, 1, 65_000)
    last = ctypes.c_void_p(libc.malloc(65_000))  # as long as it exists, the heap cannot shrink
    for block in blocks:
        libc.free(block)
    times = CallbackTimes(0.005)
    with times.measuring():
        await run_callbacks(lambda: libc.free(last))
    assert times.slow == []
