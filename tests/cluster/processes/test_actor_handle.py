"""A process seen from the driver, with Ray's errors made by hand."""

import asyncio
import signal
import subprocess
from collections.abc import Awaitable, Callable
from typing import Any

import psutil
import pytest
import ray
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from penstock.cluster.processes import actor_handle, process_id
from penstock.cluster.processes.actor_handle import ActorHandle, StartFailed
from penstock.cluster.processes.process_id import ProcessId
from penstock.cluster.status.progress_reminders import ProgressReminders
from penstock.cluster.status.status_events import (
    LogLine,
    ProcessEvent,
    Progress,
    Ready,
    StatusEvent,
)


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("start", "a traceback\nof many lines", cause)


def actor_died(message: str) -> ActorDiedError:
    context = ActorDiedErrorContext(
        error_message=message, actor_id=bytes(16), class_name="WorkerActor"
    )
    return ActorDiedError(context)


class Remote:
    """A method of an actor: `.remote(...)` gives something to await."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self.remote = call


class FakeActor:
    """An actor's handle; what its calls give is set by the test."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[list[ProcessEvent] | Exception] = asyncio.Queue()
        self.start_gives: object = "an address"
        self.stopped = 0
        self.start = Remote(self._start)
        self.next_events = Remote(self._next_events)
        self.stop = Remote(self._stop)
        self.identify = Remote(self._identify)
        self.ping = Remote(self._ping)
        self.process: ProcessId | None = None
        self.answers = True
        self.pings = 0

    async def _identify(self) -> ProcessId | None:
        return self.process

    async def _ping(self) -> None:
        self.pings += 1
        if not self.answers:
            await asyncio.Event().wait()

    async def _start(self, config: object) -> object:
        if isinstance(self.start_gives, Exception):
            raise self.start_gives
        return self.start_gives

    async def _next_events(self) -> list[ProcessEvent]:
        item = await self.events.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def _stop(self) -> None:
        self.stopped += 1


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    actors: list[object] = []
    monkeypatch.setattr(ray, "kill", actors.append)
    monkeypatch.setattr(actor_handle, "RETRY_SECONDS", 0.0)
    return actors


@pytest.fixture
async def actor() -> FakeActor:
    return FakeActor()


async def test_news_are_passed_on_until_it_dies(actor: FakeActor) -> None:
    heard: list[tuple[str, ProcessEvent]] = []
    one = ActorHandle("worker", actor, lambda title, item: heard.append((title, item)))
    actor.events.put_nowait([Progress("a"), Progress("b")])
    actor.events.put_nowait(ActorUnavailableError("out of reach", None))
    actor.events.put_nowait([Progress("c")])
    actor.events.put_nowait(ActorDiedError())
    assert await one.death() == "its process died (killed, crashed, or out of memory)"
    assert heard == [("worker", Progress(stage)) for stage in "abc"]


async def test_progress_that_arrives_after_the_start_is_dropped(actor: FakeActor) -> None:
    told: list[StatusEvent] = []
    now = 0.0
    waits = ProgressReminders(lambda _, notice: told.append(notice), lambda: now)
    one = ActorHandle("router 0", actor, waits)
    waits("router 0", Progress("starting its process"))
    await one.start("config")
    waits("router 0", Ready(2.0))
    line = LogLine("a request failed")
    actor.events.put_nowait([Progress("loading libraries"), line])  # sent before, arrives now
    actor.events.put_nowait(ActorDiedError())
    await one.death()
    assert told[1:] == [Ready(2.0), line]
    now = 100.0
    waits.remind()
    assert told[1:] == [Ready(2.0), line], "no reminder of work that is over"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (actor_died("The actor died because its node has died."), "its node died"),
        (task_error(RuntimeError("the engine failed\nat length")), "the engine failed"),
    ],
)
async def test_deaths_have_a_reason_in_one_line(
    actor: FakeActor, error: Exception, reason: str
) -> None:
    one = ActorHandle("worker", actor, lambda *_: None)
    actor.events.put_nowait(error)
    assert await one.death() == reason


async def test_a_start_says_where(actor: FakeActor) -> None:
    one = ActorHandle("worker", actor, lambda *_: None)
    assert not one.up
    assert await one.start("config") == "an address"
    assert one.up
    await one.stop()


@pytest.mark.parametrize(
    ("error", "said", "certain"),
    [
        (task_error(ValueError("no room")), "worker did not start: no room", True),
        (ActorDiedError(), "worker did not start: its process died", False),
    ],
)
async def test_a_start_fails_with_its_reason(
    actor: FakeActor, error: Exception, said: str, certain: bool
) -> None:
    actor.start_gives = error
    one = ActorHandle("worker", actor, lambda *_: None)
    with pytest.raises(StartFailed) as failure:
        await one.start("config")
    assert str(failure.value).startswith(said)
    assert failure.value.certain is certain
    one.kill()


async def test_only_what_is_up_is_asked_to_stop(actor: FakeActor, killed: list[object]) -> None:
    one = ActorHandle("worker", actor, lambda *_: None)
    await one.stop()
    assert (actor.stopped, killed) == (0, [actor])
    other = ActorHandle("worker", actor, lambda *_: None)
    await other.start("config")
    await other.stop()
    assert (actor.stopped, killed) == (1, [actor, actor])


async def test_one_that_does_not_stop_is_killed(
    actor: FakeActor, killed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_handle, "SECONDS_TO_STOP", 0.0)
    one = ActorHandle("worker", actor, lambda *_: None)
    await one.start("config")
    await one.stop()
    assert killed == [actor]


async def test_calls_of_the_dead_give_nothing(actor: FakeActor) -> None:
    async def died() -> None:
        raise ActorDiedError()

    actor.stop = Remote(died)
    one = ActorHandle("worker", actor, lambda *_: None)
    assert await one.call("stop") is None
    one.kill()


# ------------------------------------------------------------------ one that answers no more


async def test_one_that_answers_lives_and_one_that_does_not_is_dead(actor: FakeActor) -> None:
    one = ActorHandle("worker", actor, lambda *_: None, ping_timeout=0.1)
    await one.start("config")
    dying = asyncio.create_task(one.death())
    async with asyncio.timeout(60):
        while actor.pings < 5:
            await asyncio.sleep(0.01)
    assert not dying.done()
    actor.answers = False
    async with asyncio.timeout(60):
        assert await dying == "it answered nothing for 0.1 s (stopped, or stuck)"
    one.kill()


async def test_nobody_is_asked_before_it_has_started(actor: FakeActor) -> None:
    one = ActorHandle("worker", actor, lambda *_: None, ping_timeout=0.02)
    await asyncio.sleep(0.1)
    assert actor.pings == 0
    one.kill()


async def test_one_that_is_given_up_counts_as_dead_for_the_first_reason(actor: FakeActor) -> None:
    one = ActorHandle("worker", actor, lambda *_: None)
    one.declare_dead("it is stuck")
    actor.events.put_nowait(ActorDiedError())
    assert await one.death() == "it is stuck"
    one.kill()


async def test_its_end_is_seen_to_even_if_it_reads_no_request(
    actor: FakeActor, killed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[ProcessId] = []
    monkeypatch.setattr(process_id, "kill", ended.append)
    actor.process = ProcessId("node", 12, 3.0)
    one = ActorHandle("worker", actor, lambda *_: None)
    async with asyncio.timeout(60):
        while one.process is None:
            await asyncio.sleep(0)
    one.kill()
    assert (killed, ended) == ([actor], [actor.process])


def test_a_stopped_process_is_ended_and_a_number_given_anew_is_not() -> None:
    process = subprocess.Popen(["sleep", "600"])
    try:
        born = psutil.Process(process.pid).create_time()
        assert not process_id.kill_local(process.pid, born - 60.0)
        process.send_signal(signal.SIGSTOP)
        assert process_id.kill_local(process.pid, born)
        assert process.wait(60) == -signal.SIGKILL
        assert not process_id.kill_local(process.pid, born)
    finally:
        process.kill()
