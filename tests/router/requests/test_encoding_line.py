"""The queue of texts to encode is fair between tenants and bounded; cancelled jobs do not run."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from penstock.router.errors import Code, ServingError
from penstock.router.requests.encoding_line import NUM_THREADS, EncodingLine

SIZE = 2000


class Line:
    """An encoding queue whose threads are blocked, and the order in which its jobs ran."""

    def __init__(self) -> None:
        self.line = EncodingLine(100 * SIZE)
        self.ran: list[str] = []
        self.release = threading.Event()
        self.tasks: list[asyncio.Task[str]] = []

    def job(self, name: str) -> Callable[[], str]:
        def work() -> str:
            self.release.wait(60)
            self.ran.append(name)
            return name

        return work

    async def add(self, tenant: str, name: str, size: int = SIZE) -> asyncio.Task[str]:
        task = asyncio.create_task(self.line.run(tenant, size, self.job(name)))
        self.tasks.append(task)
        await asyncio.sleep(0)
        return task

    async def finish(self) -> None:
        self.release.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest_asyncio.fixture
async def line() -> AsyncIterator[Line]:
    line = Line()
    yield line
    await line.finish()
    line.line.close()


async def test_result_and_error_reach_the_caller(line: Line) -> None:
    def fail() -> str:
        raise ValueError("broken")

    line.release.set()
    assert await line.line.run("a", 1, line.job("x")) == "x"
    with pytest.raises(ValueError, match="broken"):
        await line.line.run("a", 1, fail)


async def test_tenant_with_many_texts_leaves_a_thread_to_others(line: Line) -> None:
    for number in range(10):
        await line.add("greedy", f"g{number}")
    assert line.line.num_waiting == 9
    await line.add("other", "o")
    assert line.line.num_waiting == 9
    assert NUM_THREADS == 2


async def test_tenants_are_served_equal_numbers_of_characters(line: Line) -> None:
    hold = threading.Event()
    other = asyncio.create_task(line.line.run("other", SIZE, lambda: hold.wait(60)))
    # The next job blocks the second thread. The job of `other` blocks its thread until the end.
    await line.add("y", "y")
    for number in range(4):
        await line.add("long", f"l{number}", 4 * SIZE)
    for number in range(8):
        await line.add("short", f"s{number}")
    await line.finish()
    hold.set()
    await other
    before = [name for name in line.ran if name[0] in "ls"]
    assert before.index("s3") < before.index("l2")
    assert before.index("l1") < before.index("s7")


async def test_cancelled_text_is_not_encoded(line: Line) -> None:
    await line.add("a", "first")
    gone = await line.add("a", "second")
    await line.add("a", "third")
    gone.cancel()
    await asyncio.wait([gone])
    assert line.line.num_waiting == 1
    await line.finish()
    assert line.ran == ["first", "third"]


async def test_tenant_beyond_its_share_is_refused_and_another_is_not(line: Line) -> None:
    # One job runs, and 25 wait: a quarter of the limit, which is the tenant's share.
    for number in range(26):
        await line.add("greedy", f"g{number}")
    with pytest.raises(ServingError, match="wait to be tokenized") as refusal:
        await line.line.run("greedy", SIZE, line.job("more"))
    assert refusal.value.code is Code.OVERLOADED
    assert refusal.value.retry_after is not None
    await line.add("other", "o")


async def test_text_longer_than_the_bound_is_encoded_if_nothing_waits(line: Line) -> None:
    line.release.set()
    assert await line.line.run("a", 1000 * SIZE, line.job("x")) == "x"


async def test_closed_line_refuses_waiting_and_later_texts(line: Line) -> None:
    await line.add("a", "first")
    waiting = await line.add("a", "second")
    line.line.close()
    for call in (waiting, line.line.run("a", SIZE, line.job("third"))):
        with pytest.raises(ServingError, match="shutting down") as refusal:
            await call
        assert refusal.value.code is Code.UNAVAILABLE
    await line.finish()
    assert line.ran == ["first"]
