"""A process seen from the driver, with Ray's errors made by hand."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import ray
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from penstock.cluster import member
from penstock.cluster.member import Member, StartFailed
from penstock.cluster.notices import News, Progress


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
        self.told: asyncio.Queue[list[News] | Exception] = asyncio.Queue()
        self.start_gives: object = "an address"
        self.stopped = 0
        self.start = Remote(self._start)
        self.news = Remote(self._news)
        self.stop = Remote(self._stop)

    async def _start(self, config: object) -> object:
        if isinstance(self.start_gives, Exception):
            raise self.start_gives
        return self.start_gives

    async def _news(self) -> list[News]:
        item = await self.told.get()
        if isinstance(item, Exception):
            raise item
        return item

    async def _stop(self) -> None:
        self.stopped += 1


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    actors: list[object] = []
    monkeypatch.setattr(ray, "kill", actors.append)
    monkeypatch.setattr(member, "SECONDS_BETWEEN_TRIES", 0.0)
    return actors


@pytest.fixture
async def actor() -> FakeActor:
    return FakeActor()


async def test_news_are_passed_on_until_it_dies(actor: FakeActor) -> None:
    heard: list[tuple[str, News]] = []
    one = Member("worker", actor, lambda title, item: heard.append((title, item)))
    actor.told.put_nowait([Progress("a"), Progress("b")])
    actor.told.put_nowait(ActorUnavailableError("out of reach", None))
    actor.told.put_nowait([Progress("c")])
    actor.told.put_nowait(ActorDiedError())
    assert await one.death() == "its process died (killed, crashed, or out of memory)"
    assert heard == [("worker", Progress(stage)) for stage in "abc"]


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
    one = Member("worker", actor, lambda *_: None)
    actor.told.put_nowait(error)
    assert await one.death() == reason


async def test_a_start_says_where(actor: FakeActor) -> None:
    one = Member("worker", actor, lambda *_: None)
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
    one = Member("worker", actor, lambda *_: None)
    with pytest.raises(StartFailed) as failure:
        await one.start("config")
    assert str(failure.value).startswith(said)
    assert failure.value.certain is certain
    one.kill()


async def test_only_what_is_up_is_asked_to_stop(actor: FakeActor, killed: list[object]) -> None:
    one = Member("worker", actor, lambda *_: None)
    await one.stop()
    assert (actor.stopped, killed) == (0, [actor])
    other = Member("worker", actor, lambda *_: None)
    await other.start("config")
    await other.stop()
    assert (actor.stopped, killed) == (1, [actor, actor])


async def test_one_that_does_not_stop_is_killed(
    actor: FakeActor, killed: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(member, "SECONDS_TO_STOP", 0.0)
    one = Member("worker", actor, lambda *_: None)
    await one.start("config")
    await one.stop()
    assert killed == [actor]


async def test_calls_of_the_dead_give_nothing(actor: FakeActor) -> None:
    async def died() -> None:
        raise ActorDiedError()

    actor.stop = Remote(died)
    one = Member("worker", actor, lambda *_: None)
    assert await one.call("stop") is None
    one.kill()
