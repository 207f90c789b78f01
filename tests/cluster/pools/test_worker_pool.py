"""A pool of scripted workers: it starts, restarts, drains, removes and gives up workers."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from penstock.cluster.autoscaling.pool_changes import Phase
from penstock.cluster.placement.placement_plan import WorkerPlacement
from penstock.cluster.pools.worker_pool import WorkerPool
from penstock.cluster.processes.actor_handle import StartFailed
from penstock.cluster.status.status_events import Progress, StatusEvent

PLACEMENTS = [WorkerPlacement("decode", at, ({"CPU": 1.0},), 1, 0, 1.0) for at in range(3)]


class ScriptedWorker:
    """A fake worker and its process: events control its progress, and it records its calls."""

    def __init__(self, placement: WorkerPlacement) -> None:
        self.title, self.name = placement.title, placement.name
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
    """A `WorkerPool` of scripted workers, with a record of its events, failures and pauses."""

    def __init__(self) -> None:
        self.workers: list[ScriptedWorker] = []
        self.events: list[tuple[str, StatusEvent]] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.failures: list[str] = []
        self.pauses: list[float] = []
        self.resume = asyncio.Event()
        self.worker_pool = WorkerPool(
            PLACEMENTS,
            self.make,
            self.spawn,
            7.0,
            lambda title, notice: self.events.append((title, notice)),
            lambda title, failure, seconds: self.failures.append(title),
            self.pause,
        )

    def make(self, placement: WorkerPlacement) -> ScriptedWorker:
        self.workers.append(ScriptedWorker(placement))
        return self.workers[-1]

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(work))
        return self.tasks[-1]

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.resume.clear()
        await self.resume.wait()

    @property
    def phases(self) -> list[Phase]:
        return list(self.worker_pool.phases().values())

    async def until(self, happened: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not happened():
                await asyncio.sleep(0)

    async def serve(self, number: int) -> None:
        """Scale the pool to `number` workers and wait until they serve."""
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


async def test_pool_starts_the_requested_number_of_workers(pool: Pool) -> None:
    assert pool.phases == [Phase.EMPTY] * 3
    pool.worker_pool.scale_to(2, {})
    assert pool.phases == [Phase.PENDING, Phase.PENDING, Phase.EMPTY]
    await pool.serve(2)
    assert [worker.name for worker in pool.workers] == ["decode-0", "decode-1"]


async def test_removed_worker_drains_before_its_placement_is_free(pool: Pool) -> None:
    await pool.serve(2)
    other, idle = pool.workers
    pool.worker_pool.scale_to(1, {"decode-0": 5.0})
    await pool.until(lambda: "drains 7" in idle.happened)
    assert pool.phases == [Phase.SERVING, Phase.DRAINING, Phase.EMPTY]
    pool.worker_pool.scale_to(1, {})
    pool.worker_pool.scale_to(2, {})
    assert pool.phases[2] is Phase.PENDING, "a draining worker is not taken back"
    idle.has_drained.set()
    await pool.until(lambda: pool.phases[1] is Phase.EMPTY)
    assert idle.happened == ["made", "drains 7", "left"]
    assert other.happened == ["made"]
    assert (idle.title, Progress("gone")) in pool.events


async def test_worker_that_waits_for_its_placement_is_removed_at_once(pool: Pool) -> None:
    pool.worker_pool.scale_to(1, {})
    await asyncio.sleep(0)
    pool.worker_pool.scale_to(0, {})
    await pool.until(lambda: pool.phases == [Phase.EMPTY] * 3)
    assert pool.workers[0].happened == ["left"]


async def test_worker_that_dies_is_pending_until_it_serves_again(pool: Pool) -> None:
    await pool.serve(1)
    pool.workers[0].dies.set()
    await pool.until(lambda: pool.phases[0] is Phase.PENDING)
    await pool.until(lambda: pool.phases[0] is Phase.SERVING)
    assert pool.workers[0].happened == ["made", "made"]


async def test_worker_that_dies_while_it_drains_is_not_restarted(pool: Pool) -> None:
    await pool.serve(1)
    (worker,) = pool.workers
    pool.worker_pool.scale_to(0, {})
    await pool.until(lambda: "drains 7" in worker.happened)
    worker.dies.set()
    worker.has_drained.set()
    await pool.until(lambda: pool.phases[0] is Phase.EMPTY)
    assert worker.happened == ["made", "drains 7", "left"]


async def test_worker_that_cannot_start_is_given_up_and_another_is_started(pool: Pool) -> None:
    pool.worker_pool.scale_to(1, {})
    (worker,) = pool.workers
    worker.fails = StartFailed(worker.title, "no memory", certain=True)
    worker.is_placed.set()
    await pool.until(lambda: pool.phases[0] is Phase.FAILED)
    assert pool.failures == ["decode worker 0"]
    assert worker.happened == ["made", "released"]
    await pool.serve(1)
    assert pool.phases == [Phase.FAILED, Phase.SERVING, Phase.EMPTY]


async def test_given_up_worker_is_retried_after_growing_pauses(pool: Pool) -> None:
    for number in range(3):
        pool.worker_pool.scale_to(1, {})
        worker = pool.workers[number]
        worker.fails = StartFailed(worker.title, "its folder is not there", certain=True)
        worker.is_placed.set()
        await pool.until(lambda: len(pool.pauses) == number + 1)  # noqa: B023
        pool.worker_pool.scale_to(0, {})
        assert worker.happened == ["made", "released"], (
            "a given-up worker has released its resources already"
        )
        assert pool.phases[0] is Phase.FAILED
        pool.resume.set()
        await pool.until(lambda: pool.phases == [Phase.EMPTY] * 3)
    first, second, third = pool.pauses
    assert (second, third) == (2 * first, 4 * first)
    await pool.serve(1)
    assert pool.phases == [Phase.SERVING, Phase.EMPTY, Phase.EMPTY]


async def test_reassigned_worker_is_neither_counted_nor_removed(pool: Pool) -> None:
    await pool.serve(2)
    reassigned = {"decode-0"}
    assert list(pool.worker_pool.phases(reassigned).values()) == [
        Phase.REASSIGNED,
        Phase.SERVING,
        Phase.EMPTY,
    ]
    pool.worker_pool.scale_to(2, {}, reassigned)
    assert list(pool.worker_pool.phases(reassigned).values()) == [
        Phase.REASSIGNED,
        Phase.SERVING,
        Phase.PENDING,
    ]
    pool.worker_pool.scale_to(0, {}, reassigned)
    for worker in pool.workers[1:]:
        worker.has_drained.set()
    await pool.until(lambda: pool.phases[1:] == [Phase.EMPTY] * 2)
    assert pool.workers[0].happened == ["made"]
    pool.workers[0].dies.set()  # The worker dies; its replacement must keep the role.
    await pool.until(lambda: pool.phases[0] is Phase.PENDING)
    assert pool.worker_pool.phases(reassigned)["decode-0"] is Phase.REASSIGNED
    await pool.until(lambda: pool.phases[0] is Phase.SERVING)
    # Without `reassigned`, the worker counts as a worker of its pool again.
    pool.worker_pool.scale_to(0, {})
    await pool.until(lambda: pool.phases[0] is Phase.DRAINING)
