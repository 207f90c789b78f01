"""EngineThread runs commands between steps and passes results to the event loop."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.common.worker_load import WorkerLoad
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.engine_thread import EngineThread
from penstock.workers.engine.results import StepResult
from penstock.workers.health.watchdog import HANG_FACTOR, ProgressTimer
from penstock.workers.scheduling.cache_report import CacheReporter
from penstock.workers.scheduling.kv_pool import BlockPool


@dataclass
class StubPlan:
    ahead: bool = False

    def fill(self, drawn: object) -> None:
        raise AssertionError("the stub never plans ahead")


class StubEngine:
    """A stub engine that counts its plans; each of its `work` steps waits until `gate` is released.

    The stub is also its own batcher, executor and output processor.
    """

    def __init__(self, plans_ahead: bool) -> None:
        self.batcher = self.executor = self.outputs = self
        self.cache_reporter = CacheReporter(BlockPool(1).published)
        self.plans_ahead = plans_ahead
        self.on_device = False
        self.limits = SimpleNamespace(num_stages=1)
        self.times = SimpleNamespace(longest=0.0)
        self.table = None
        self.num_in_flight = 0
        self.work = 0
        self.num_plans = 0
        self.log: list[str] = []
        self.gate = threading.Semaphore(0)
        self.stepping = threading.Event()
        self.idled = threading.Event()

    def plan(self) -> StubPlan | None:
        if self.num_in_flight:
            return None
        self.num_plans += 1
        self.num_in_flight = min(self.work, 1)
        return StubPlan() if self.work else None

    def stop(self) -> None:
        pass

    def idle(self) -> None:
        assert not self.num_in_flight
        self.idled.set()

    def broadcast(self, plan: StubPlan) -> None:
        pass

    def drain_events(self, result: StepResult) -> None:
        pass

    def begin_masks(self, plan: StubPlan, table: None) -> None:
        pass

    def execute(self, plan: StubPlan, table: None) -> Any:
        return self.sample(plan, self.execute_model(plan), table)

    def execute_model(self, plan: StubPlan) -> str:
        self.stepping.set()
        assert self.gate.acquire(timeout=60)
        return "logits"

    def sample(self, plan: StubPlan, logits: str, table: None) -> Any:
        return SimpleNamespace(tokens=None)

    def commit(self, plan: StubPlan, sampled: object, seconds: float, result: StepResult) -> None:
        self.num_in_flight = 0
        self.work -= 1
        self.log.append("step")
        result.output = cast(Any, "output")

    def load(self) -> WorkerLoad:
        return cast(WorkerLoad, self.num_plans)


class Received:
    """The results and errors that the event loop has received."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []
        self.errors: list[BaseException] = []
        self._changed = asyncio.Event()

    def deliver(self, result: StepResult, load: WorkerLoad) -> None:
        self.results.append(result)
        self._changed.set()

    def fatal(self, error: BaseException) -> None:
        self.errors.append(error)
        self._changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


def start_engine(ahead: bool) -> tuple[StubEngine, Received, EngineThread]:
    engine, received = StubEngine(ahead), Received()
    return engine, received, EngineThread(cast(Engine, engine), received.deliver, received.fatal)


AHEAD = pytest.mark.parametrize("ahead", [False, True])


@AHEAD
async def test_progress_timer_runs_while_a_step_does_not_end(ahead: bool) -> None:
    engine, received, timer = StubEngine(ahead), Received(), ProgressTimer("the engine", 60.0)
    loop = EngineThread(cast(Engine, engine), received.deliver, received.fatal, timer)
    await loop.call(lambda _: None)
    await received.until(lambda: len(received.results) == 1)
    # The thread may become idle shortly after the result has arrived.
    async with asyncio.timeout(60):
        while timer.waited(time.monotonic() + 100):
            await asyncio.sleep(0.001)
    loop.post(add_work(2))
    await asyncio.to_thread(engine.stepping.wait, 60)
    # Commands run meanwhile, but they do not count as progress of the engine.
    calls = [loop.call(lambda _: None) for _ in range(3)] if ahead else []
    await asyncio.gather(*calls)
    assert timer.waited(time.monotonic() + 100) > 100
    engine.times.longest = 40.0
    engine.gate.release(2)
    await received.until(lambda: engine.log.count("step") == 2)
    loop.stop()
    await asyncio.to_thread(loop.join, 60)
    assert timer.bound == HANG_FACTOR * 40.0
    assert timer.waited(time.monotonic() + 100) == 0.0


def add_work(amount: int) -> Callable[[Any], None]:
    def add(engine: StubEngine) -> None:
        engine.work += amount

    return add


async def test_commands_run_in_order_before_the_next_step() -> None:
    engine, received, loop = start_engine(ahead=False)
    loop.post(add_work(3))
    await asyncio.to_thread(engine.stepping.wait, 60)
    for name in "ab":
        loop.post(lambda _, name=name: engine.log.append(name))  # type: ignore[misc]
    assert engine.log == []  # `post` returns before the running step ends
    engine.gate.release()
    await received.until(lambda: len(received.results) == 1)
    engine.gate.release(2)
    await received.until(lambda: len(received.results) == 3)
    assert engine.log == ["step", "a", "b", "step", "step"]
    loop.stop()
    await asyncio.to_thread(loop.join, 60)


async def test_commands_do_not_wait_for_the_step_when_planning_ahead() -> None:
    engine, received, loop = start_engine(ahead=True)
    loop.post(add_work(3))
    await asyncio.to_thread(engine.stepping.wait, 60)
    for name in "ab":
        loop.post(lambda _, name=name: engine.log.append(name))  # type: ignore[misc]
    await loop.call(lambda _: None)
    assert engine.log == ["a", "b"]  # the first step has not ended yet
    engine.gate.release(3)
    await received.until(lambda: engine.log.count("step") == 3)
    assert engine.log == ["a", "b", "step", "step", "step"]
    loop.stop()
    await asyncio.to_thread(loop.join, 60)


@AHEAD
async def test_reply_to_a_call_does_not_wait_for_the_next_step(ahead: bool) -> None:
    engine, _, loop = start_engine(ahead)
    loop.post(add_work(1))
    answer = loop.call(lambda _: 42)

    def refuse(_: Engine) -> int:
        raise KeyError("no")

    refused = loop.call(refuse)
    await asyncio.to_thread(engine.stepping.wait, 60)
    engine.gate.release()
    assert await answer == 42
    with pytest.raises(KeyError):
        await refused
    loop.stop()
    await asyncio.to_thread(loop.join, 60)


@AHEAD
async def test_idle_engine_plans_only_after_a_command(ahead: bool) -> None:
    engine, received, loop = start_engine(ahead)
    await loop.call(lambda _: None)
    await received.until(lambda: len(received.results) == 1)
    num_plans = engine.num_plans
    assert num_plans == 1
    await loop.call(lambda _: None)
    await received.until(lambda: len(received.results) == 2)
    assert engine.num_plans == num_plans + 1
    loop.stop()
    await asyncio.to_thread(loop.join, 60)


@AHEAD
async def test_cores_are_left_to_others_only_when_no_step_is_in_flight(ahead: bool) -> None:
    engine, received, loop = start_engine(ahead)
    await loop.call(lambda _: None)
    assert await asyncio.to_thread(engine.idled.wait, 60)
    loop.post(add_work(2))
    await asyncio.to_thread(engine.stepping.wait, 60)
    engine.idled.clear()
    engine.gate.release()
    await received.until(lambda: engine.log.count("step") == 1)
    assert not engine.idled.is_set()
    engine.gate.release()
    assert await asyncio.to_thread(engine.idled.wait, 60)
    assert engine.log.count("step") == 2
    loop.stop()
    await asyncio.to_thread(loop.join, 60)


@AHEAD
async def test_exception_in_a_posted_command_is_fatal(ahead: bool) -> None:
    _, received, loop = start_engine(ahead)

    def broken(_: Engine) -> None:
        raise RuntimeError("block counts differ")

    loop.post(broken)
    await received.until(lambda: bool(received.errors))
    assert "block counts" in str(received.errors[0])
    await asyncio.to_thread(loop.join, 60)
