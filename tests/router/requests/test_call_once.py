"""CallOnce: one call in the next iteration of the event loop, and no two at a time."""

import asyncio

from penstock.router.requests.call_once import CallOnce


async def test_several_reasons_cause_one_call_in_the_next_iteration() -> None:
    calls: list[int] = []
    once = CallOnce(lambda: calls.append(1))
    for _ in range(3):
        once.schedule()
    assert calls == []
    await asyncio.sleep(0)
    assert calls == [1]
    await asyncio.sleep(0)
    assert calls == [1]


async def test_call_may_schedule_the_next_call() -> None:
    calls: list[int] = []

    def call() -> None:
        calls.append(len(calls))
        if len(calls) < 3:
            once.schedule()
            once.schedule()

    once = CallOnce(call)
    once.schedule()
    for number in range(1, 5):
        await asyncio.sleep(0)
        assert len(calls) == min(number, 3)
