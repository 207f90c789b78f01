"""The engine's thread: commands between steps, results to the event loop, neither waits."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from penstock.workers.engine import Engine, EngineLoad, StepResult
from penstock.workers.loop import EngineLoop


class StubEngine:
    """Counts; a step takes until it is let go, while there is work."""

    def __init__(self) -> None:
        self.work = 0
        self.num_steps = 0
        self.log: list[str] = []
        self.gate = threading.Semaphore(0)
        self.stepping = threading.Event()

    def step(self) -> StepResult:
        self.num_steps += 1
        if not self.work:
            return StepResult()
        self.stepping.set()
        assert self.gate.acquire(timeout=60)
        self.work -= 1
        self.log.append("step")
        return StepResult(output=cast(Any, "output"))

    def load(self) -> EngineLoad:
        return cast(EngineLoad, self.num_steps)


class Heard:
    """What the loop was told, and a way to wait for it."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []
        self.errors: list[BaseException] = []
        self._changed = asyncio.Event()

    def deliver(self, result: StepResult, load: EngineLoad) -> None:
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


def started() -> tuple[StubEngine, Heard, EngineLoop]:
    engine, heard = StubEngine(), Heard()
    return engine, heard, EngineLoop(cast(Engine, engine), heard.deliver, heard.fatal)


def add_work(amount: int) -> Callable[[Any], None]:
    def add(engine: StubEngine) -> None:
        engine.work += amount

    return add


async def test_commands_are_applied_in_order_at_the_next_boundary() -> None:
    engine, heard, loop = started()
    loop.post(add_work(3))
    await asyncio.to_thread(engine.stepping.wait, 60)
    for name in "ab":
        loop.post(lambda _, name=name: engine.log.append(name))  # type: ignore[misc]
    assert engine.log == []  # a step is under way, and nobody waits for it
    engine.gate.release()
    await heard.until(lambda: len(heard.results) == 1)
    engine.gate.release(2)
    await heard.until(lambda: len(heard.results) == 3)
    assert engine.log == ["step", "a", "b", "step", "step"]
    loop.stop()
    await asyncio.to_thread(loop.join, 60)


async def test_an_answer_does_not_wait_for_the_step_that_follows() -> None:
    engine, _, loop = started()
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


async def test_an_idle_engine_is_left_alone() -> None:
    engine, heard, loop = started()
    await loop.call(lambda _: None)
    await heard.until(lambda: len(heard.results) == 1)
    num_steps = engine.num_steps
    assert num_steps <= 2
    await loop.call(lambda _: None)
    await heard.until(lambda: len(heard.results) == 2)
    assert engine.num_steps == num_steps + 1
    loop.stop()
    await asyncio.to_thread(loop.join, 60)


async def test_what_a_command_raises_without_an_answer_is_fatal() -> None:
    _, heard, loop = started()

    def broken(_: Engine) -> None:
        raise RuntimeError("a ledger that does not balance")

    loop.post(broken)
    await heard.until(lambda: bool(heard.errors))
    assert "ledger" in str(heard.errors[0])
    await asyncio.to_thread(loop.join, 60)
