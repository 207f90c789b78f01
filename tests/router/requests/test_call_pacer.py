"""CallPacer: calls begin in order, and other callbacks run between them."""

import asyncio

from penstock.router.requests.call_pacer import CallPacer


async def test_one_call_begins_in_each_iteration_in_order_of_arrival() -> None:
    pacer, begun = CallPacer(), list[int]()

    async def call(number: int) -> None:
        await pacer.wait()
        begun.append(number)

    calls = [asyncio.create_task(call(number)) for number in range(5)]
    counts = []
    while len(begun) < 5:
        before = len(begun)
        await asyncio.sleep(0)
        counts.append(len(begun) - before)
    assert begun == [0, 1, 2, 3, 4]
    assert max(counts) == 1
    await asyncio.gather(*calls)


async def test_call_alone_begins_at_once() -> None:
    pacer = CallPacer()
    for _ in range(3):
        call = pacer.wait()
        try:
            call.send(None)
        except StopIteration:
            pass
        else:
            raise AssertionError("the call had to wait")
        await asyncio.sleep(0)  # begin the next iteration of the event loop


async def test_cancelled_call_is_skipped() -> None:
    pacer = CallPacer()
    waiting = [asyncio.create_task(pacer.wait()) for _ in range(4)]
    await asyncio.sleep(0)  # the first call begins; the other three wait
    for each in waiting[1:3]:
        each.cancel()
    await asyncio.wait_for(waiting[3], 30)
    await asyncio.sleep(0)
    await asyncio.wait_for(pacer.wait(), 30)
