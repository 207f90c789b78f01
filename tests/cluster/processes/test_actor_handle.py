"""The driver's handle of a process, with a fake actor that raises Ray's errors."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import ray
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ActorUnschedulableError,
    NodeDiedError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
)

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
    """A fake actor method: `.remote(...)` returns an awaitable."""

    def __init__(self, call: Callable[..., Awaitable[Any]]) -> None:
        self.remote = call


class FakeActor:
    """A fake Ray actor, whose replies are set by the test."""

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


async def test_events_are_reported_until_the_process_dies(actor: FakeActor) -> None:
    reported: list[tuple[str, ProcessEvent]] = []
    handle = ActorHandle("worker", actor, lambda title, item: reported.append((title, item)))
    actor.events.put_nowait([Progress("a"), Progress("b")])
    actor.events.put_nowait(ActorUnavailableError("out of reach", None))
    actor.events.put_nowait([Progress("c")])
    actor.events.put_nowait(ActorDiedError())
    assert await handle.death() == "its process died (killed, crashed, or out of memory)"
    assert reported == [("worker", Progress(stage)) for stage in "abc"]


async def test_progress_that_arrives_after_the_start_is_dropped(actor: FakeActor) -> None:
    reported: list[StatusEvent] = []
    now = 0.0
    reminders = ProgressReminders(lambda _, notice: reported.append(notice), lambda: now)
    handle = ActorHandle("router 0", actor, reminders)
    reminders("router 0", Progress("starting its process"))
    await handle.start("config")
    reminders("router 0", Ready(2.0))
    line = LogLine("a request failed")
    # `Progress` is received late here: it was sent before `Ready`.
    actor.events.put_nowait([Progress("loading libraries"), line])
    actor.events.put_nowait(ActorDiedError())
    await handle.death()
    assert reported[1:] == [Ready(2.0), line]
    now = 100.0
    reminders.remind()
    assert reported[1:] == [Ready(2.0), line], "no reminder of a finished stage"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (actor_died("The actor died because its node has died."), "its node died"),
        (task_error(RuntimeError("the engine failed\nat length")), "the engine failed"),
        (
            OutOfMemoryError("killed\nat length"),
            "its process died (killed, crashed, or out of memory)",
        ),
    ],
)
async def test_death_has_a_one_line_reason(actor: FakeActor, error: Exception, reason: str) -> None:
    handle = ActorHandle("worker", actor, lambda *_: None)
    actor.events.put_nowait(error)
    assert await handle.death() == reason


async def test_start_returns_the_address(actor: FakeActor) -> None:
    handle = ActorHandle("worker", actor, lambda *_: None)
    assert not handle.up
    assert await handle.start("config") == "an address"
    assert handle.up
    await handle.stop()


@pytest.mark.parametrize(
    ("error", "message", "certain"),
    [
        (task_error(ValueError("no room")), "worker did not start: no room", True),
        (ActorDiedError(), "worker did not start: its process died", False),
    ],
)
async def test_failed_start_raises_with_its_reason(
    actor: FakeActor, error: Exception, message: str, certain: bool
) -> None:
    actor.start_gives = error
    handle = ActorHandle("worker", actor, lambda *_: None)
    with pytest.raises(StartFailed) as failure:
        await handle.start("config")
    assert str(failure.value).startswith(message)
    assert failure.value.certain is certain
    handle.kill()


async def test_only_a_started_process_gets_a_stop_call(
    actor: FakeActor, killed: list[object]
) -> None:
    handle = ActorHandle("worker", actor, lambda *_: None)
    await handle.stop()
    assert (actor.stopped, killed) == (0, [actor])
    other = ActorHandle("worker", actor, lambda *_: None)
    await other.start("config")
    await other.stop()
    assert (actor.stopped, killed) == (1, [actor, actor])


async def test_process_that_does_not_stop_in_time_is_killed(
    actor: FakeActor, killed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_handle, "SECONDS_TO_STOP", 0.0)
    handle = ActorHandle("worker", actor, lambda *_: None)
    await handle.start("config")
    await handle.stop()
    assert killed == [actor]


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        ActorUnavailableError("out of reach", None),
        ActorUnschedulableError("its node has died"),
        NodeDiedError("its node has died"),
        OutOfMemoryError("Ray's memory monitor has killed it"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_call_of_a_dead_process_returns_none(actor: FakeActor, error: RayError) -> None:
    async def died() -> None:
        raise error

    actor.stop = Remote(died)
    handle = ActorHandle("worker", actor, lambda *_: None)
    assert await handle.call("stop") is None
    handle.kill()


async def test_call_raises_the_error_of_the_method(actor: FakeActor) -> None:
    async def failed() -> None:
        raise task_error(ValueError("unknown worker"))

    actor.stop = Remote(failed)
    handle = ActorHandle("worker", actor, lambda *_: None)
    with pytest.raises(RayTaskError):
        await handle.call("stop")
    handle.kill()


async def test_drain_that_does_not_reply_in_time_is_given_up(
    actor: FakeActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[float] = []

    async def drain(seconds: float) -> None:
        requested.append(seconds)
        await asyncio.Event().wait()

    monkeypatch.setattr(actor, "drain", Remote(drain), raising=False)
    monkeypatch.setattr(actor_handle, "DRAIN_REPLY_SECONDS", 0.01)
    handle = ActorHandle("worker", actor, lambda *_: None)
    async with asyncio.timeout(60):
        await handle.drain(0.01)
    assert requested == [0.01]
    handle.kill()


# ------------------------------------------------------------------ pings and declared deaths


async def test_process_that_stops_replying_to_pings_counts_as_dead(actor: FakeActor) -> None:
    handle = ActorHandle("worker", actor, lambda *_: None, ping_timeout=0.1)
    await handle.start("config")
    dying = asyncio.create_task(handle.death())
    async with asyncio.timeout(60):
        while actor.pings < 5:
            await asyncio.sleep(0.01)
    assert not dying.done()
    actor.answers = False
    async with asyncio.timeout(60):
        assert await dying == "no reply for 0.1 s (process stopped or stuck)"
    handle.kill()


async def test_process_is_not_pinged_before_it_has_started(actor: FakeActor) -> None:
    handle = ActorHandle("worker", actor, lambda *_: None, ping_timeout=0.02)
    await asyncio.sleep(0.1)
    assert actor.pings == 0
    handle.kill()


async def test_declared_death_keeps_its_reason_when_the_process_dies(actor: FakeActor) -> None:
    handle = ActorHandle("worker", actor, lambda *_: None)
    handle.declare_dead("it is stuck")
    actor.events.put_nowait(ActorDiedError())
    assert await handle.death() == "it is stuck"
    handle.kill()


async def test_kill_also_kills_by_process_id(
    actor: FakeActor, killed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[ProcessId] = []
    monkeypatch.setattr(process_id, "kill", ended.append)
    actor.process = ProcessId("node", 12, 3.0)
    handle = ActorHandle("worker", actor, lambda *_: None)
    async with asyncio.timeout(60):
        while handle.process is None:
            await asyncio.sleep(0)
    handle.kill()
    assert (killed, ended) == ([actor], [actor.process])
