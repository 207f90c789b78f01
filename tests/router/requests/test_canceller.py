"""RequestCanceller: cancels in order, and a few requests per callback of the event loop."""

import asyncio

import pytest

from penstock.router.requests.canceller import MAX_PER_CALLBACK, RequestCanceller


async def test_requests_are_cancelled_in_order_and_a_few_per_callback() -> None:
    cancelled: list[int] = []
    canceller = RequestCanceller(cancelled.append)
    total = 3 * MAX_PER_CALLBACK + 1
    canceller.cancel(range(total - 1))
    canceller.cancel([total - 1])
    counts = []
    while len(cancelled) < total:
        counts.append(len(cancelled))
        await asyncio.sleep(0)
    assert cancelled == list(range(total))
    assert counts == [MAX_PER_CALLBACK, 2 * MAX_PER_CALLBACK, 3 * MAX_PER_CALLBACK]


async def test_few_requests_are_cancelled_at_once() -> None:
    cancelled: list[int] = []
    canceller = RequestCanceller(cancelled.append)
    for number in range(3):
        canceller.cancel([number])
        assert cancelled[-1] == number


async def test_cancelling_may_end_other_calls() -> None:
    """The end of one request may end other calls, whose requests are cancelled later."""
    cancelled: list[int] = []

    def cancel(request: int) -> None:
        cancelled.append(request)
        if request < 3:
            canceller.cancel([request + 10])
            assert cancelled[-1] == request

    canceller = RequestCanceller(cancel)
    canceller.cancel([0, 1, 2])
    assert cancelled == [0, 1, 2]
    await asyncio.sleep(0)
    assert cancelled == [0, 1, 2, 10, 11, 12]


async def test_requests_after_a_failure_are_cancelled_too() -> None:
    cancelled: list[int] = []

    def cancel(request: int) -> None:
        if request == 1:
            raise RuntimeError("cancelling failed")
        cancelled.append(request)

    canceller = RequestCanceller(cancel)
    with pytest.raises(RuntimeError, match="cancelling failed"):
        canceller.cancel([0, 1, 2])
    await asyncio.sleep(0)
    assert cancelled == [0, 2]
