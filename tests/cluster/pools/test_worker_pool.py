"""A pool's workers, scripted: made, kept alive, drained before they go, given up."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from penstock.cluster.autoscaling.pool_changes import Phase
from penstock.cluster.placement.placement import WorkerPlacement
from penstock.cluster.pools.worker_pool import WorkerPool
from penstock.cluster.processes.actor_handle import StartFailed
from penstock.cluster.status.status_events import Progress, StatusEvent

PLACEMENTS = [WorkerPlacement("decode", at, ({"CPU": 1.0},), 1, 0, 1.0) for at in range(3)]


class ScriptedWorker:
    """A worker, its process and what has happened to it in turn; it goes on when told to."""

    def __init__(self, place: WorkerPlacement) -> None:
        self.title, self.name = place.title, place.name
        self.config = None
        self.ready = asyncio.Event()
        self.serves = False
        self.is_placed, self.has_drained = asyncio.Event(), asyncio.Event()
        self.dies = asyncio.Event()
        self.fails: StartFailed | None = None
        self.happened: list[str] = []

    async def reserve(self) -> None:
        await self.is_placed.wait()

    def make(self) -> "ScriptedWorker":
        self.happened.append("made")
        self.dies.clear()
        return self

    async def start(self, config: object) -> Any:
        await asyncio.sleep(0)
        if self.fails is not None:
            raise self.fails
        return "somewhere"

    async def on_ready(self, where: Any) -> None:
        self.serves = True
        self.ready.set()

    async def death(self) -> str:
        await self.dies.wait()
        return "it died"

    async def on_exit(self) -> None:
        self.serves = False

    def kill(self) -> None:
        pass

    async def drain(self, seconds: float) -> None:
        self.happened.append(f"drains {seconds:g}")
        await self.has_drained.wait()

    async def shut_down(self) -> None:
        self.serves = False
        self.happened.append("left")

    def release(self) -> None:
        self.happened.append("released")


class Pool:
    """A workforce of scripted workers."""

    def __init__(self) -> None:
        self.workers: list[ScriptedWorker] = []
        self.events: list[tuple[str, StatusEvent]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.failures: list[str] = []
        self.pauses: list[float] = []
        self.goes_on = asyncio.Event()
        self.worker_pool = WorkerPool(
            PLACEMENTS,
            self.make,
            self.spawn,
            7.0,
            lambda title, notice: self.events.append((title, notice)),
            lambda title, failure, seconds: self.failures.append(title),
            self.pause,
        )

    def make(self, place: WorkerPlacement) -> ScriptedWorker:
        self.workers.append(ScriptedWorker(place))
        return self.workers[-1]

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.goes_on.clear()
        await self.goes_on.wait()

    @property
    def phases(self) -> list[Phase]:
        return list(self.worker_pool.phases().values())

    async def until(self, happened: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not happened():
                await asyncio.sleep(0)

    async def serve(self, number: int) -> None:
        """Have so many serve."""
        self.worker_pool.scale_to(number, {})
        for worker in self.workers:
            worker.is_placed.set()
        await self.until(lambda: self.phases.count(Phase.SERVING) == number)


@pytest.fixture
async def pool() -> Any:
    made = Pool()
    yield made
    for task in made.tasks:
        task.cancel()
        await asyncio.wait((task,))


async def test_what_is_asked_for_is_made_and_serves(pool: Pool) -> None:
    assert pool.phases == [Phase.EMPTY] * 3
    pool.worker_pool.scale_to(2, {})
    assert pool.phases == [Phase.PENDING, Phase.PENDING, Phase.EMPTY]
    await pool.serve(2)
    assert [worker.name for worker in pool.workers] == ["decode-0", "decode-1"]


async def test_one_too_many_drains_before_it_goes_and_its_place_is_free_then(pool: Pool) -> None:
    await pool.serve(2)
    other, idle = pool.workers
    pool.worker_pool.scale_to(1, {"decode-0": 5.0})
    await pool.until(lambda: "drains 7" in idle.happened)
    assert pool.phases == [Phase.SERVING, Phase.DRAINING, Phase.EMPTY]
    pool.worker_pool.scale_to(1, {})
    pool.worker_pool.scale_to(2, {})
    assert pool.phases[2] is Phase.PENDING, "one that drains does not come back"
    idle.has_drained.set()
    await pool.until(lambda: pool.phases[1] is Phase.EMPTY)
    assert idle.happened == ["made", "drains 7", "left"]
    assert other.happened == ["made"]
    assert (idle.title, Progress("gone")) in pool.events


async def test_what_waits_for_its_place_goes_at_once(pool: Pool) -> None:
    pool.worker_pool.scale_to(1, {})
    await asyncio.sleep(0)
    pool.worker_pool.scale_to(0, {})
    await pool.until(lambda: pool.phases == [Phase.EMPTY] * 3)
    assert pool.workers[0].happened == ["left"]


async def test_one_that_dies_is_pending_until_it_serves_again(pool: Pool) -> None:
    await pool.serve(1)
    pool.workers[0].dies.set()
    await pool.until(lambda: pool.phases[0] is Phase.PENDING)
    await pool.until(lambda: pool.phases[0] is Phase.SERVING)
    assert pool.workers[0].happened == ["made", "made"]


async def test_one_that_dies_while_it_drains_does_not_come_back(pool: Pool) -> None:
    await pool.serve(1)
    (worker,) = pool.workers
    pool.worker_pool.scale_to(0, {})
    await pool.until(lambda: "drains 7" in worker.happened)
    worker.dies.set()
    worker.has_drained.set()
    await pool.until(lambda: pool.phases[0] is Phase.EMPTY)
    assert worker.happened == ["made", "drains 7", "left"]


async def test_what_cannot_start_is_given_up_and_another_place_is_taken(pool: Pool) -> None:
    pool.worker_pool.scale_to(1, {})
    (worker,) = pool.workers
    worker.fails = StartFailed(worker.title, "no memory", certain=True)
    worker.is_placed.set()
    await pool.until(lambda: pool.phases[0] is Phase.FAILED)
    assert pool.failures == ["decode worker 0"]
    assert worker.happened == ["made", "released"]
    await pool.serve(1)
    assert pool.phases == [Phase.FAILED, Phase.SERVING, Phase.EMPTY]


async def test_what_was_given_up_is_tried_again_later(pool: Pool) -> None:
    for number in range(3):
        pool.worker_pool.scale_to(1, {})
        worker = pool.workers[number]
        worker.fails = StartFailed(worker.title, "its folder is not there", certain=True)
        worker.is_placed.set()
        await pool.until(lambda: len(pool.pauses) == number + 1)  # noqa: B023
        pool.worker_pool.scale_to(0, {})
        assert worker.happened == ["made", "released"], "it holds nothing that it could give back"
        assert pool.phases[0] is Phase.FAILED
        pool.goes_on.set()
        await pool.until(lambda: pool.phases == [Phase.EMPTY] * 3)
    first, second, third = pool.pauses
    assert (second, third) == (2 * first, 4 * first)
    await pool.serve(1)
    assert pool.phases == [Phase.SERVING, Phase.EMPTY, Phase.EMPTY]


async def test_one_that_has_another_role_is_neither_counted_nor_let_go(pool: Pool) -> None:
    await pool.serve(2)
    lent = {"decode-0"}
    assert list(pool.worker_pool.phases(lent).values()) == [
        Phase.REASSIGNED,
        Phase.SERVING,
        Phase.EMPTY,
    ]
    pool.worker_pool.scale_to(2, {}, lent)
    assert list(pool.worker_pool.phases(lent).values()) == [
        Phase.REASSIGNED,
        Phase.SERVING,
        Phase.PENDING,
    ]
    pool.worker_pool.scale_to(0, {}, lent)
    for worker in pool.workers[1:]:
        worker.has_drained.set()
    await pool.until(lambda: pool.phases[1:] == [Phase.EMPTY] * 2)
    assert pool.workers[0].happened == ["made"]
    pool.workers[0].dies.set()  # what follows it has its role
    await pool.until(lambda: pool.phases[0] is Phase.PENDING)
    assert pool.worker_pool.phases(lent)["decode-0"] is Phase.REASSIGNED
    await pool.until(lambda: pool.phases[0] is Phase.SERVING)
    pool.worker_pool.scale_to(0, {})  # given back
    await pool.until(lambda: pool.phases[0] is Phase.DRAINING)
