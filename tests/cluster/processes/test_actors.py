"""What a hosted process tells: the news, without Ray."""

import asyncio
import gc
import logging
import weakref

import pytest

from penstock.cluster.processes.actors import (
    MAX_QUEUED_EVENTS,
    ActorFailed,
    EventQueue,
    RouterActor,
    WorkerActor,
    freeze_heap,
)
from penstock.cluster.status.status_events import LogLine, Progress
from penstock.router.config import RouterConfig


async def test_news_wait_for_whoever_asks() -> None:
    room = EventQueue()
    asking = asyncio.create_task(room.next())
    await asyncio.sleep(0)
    assert not asking.done()
    room.add(LogLine("one"))
    room.add(LogLine("two"))
    assert await asking == [LogLine("one"), LogLine("two")]


class Node:
    """Can be part of a cycle."""

    other: "Node"


def test_what_is_there_is_looked_through_once_and_what_comes_later_as_ever() -> None:
    before = gc.get_freeze_count()
    try:
        dead, kept = Node(), Node()
        dead.other, kept.other = dead, kept
        gone = weakref.ref(dead)
        del dead
        freeze_heap()
        assert gone() is None, "cycles that nobody has go first"
        assert gc.get_freeze_count() > before + 10_000
        assert all(each is not kept for each in gc.get_objects())
        later = Node()
        later.other = later
        gone = weakref.ref(later)
        del later
        gc.collect()
        assert gone() is None
    finally:
        gc.unfreeze()


async def test_of_a_stage_only_the_latest_is_told() -> None:
    room = EventQueue()
    for done in range(10):
        room.add(Progress("weights", done, 10))
    room.add(Progress("warming up"))
    assert await room.next() == [Progress("weights", 9, 10), Progress("warming up")]


async def test_news_are_told_from_any_thread() -> None:
    room = EventQueue()
    await asyncio.to_thread(room.add, LogLine("from afar"))
    assert await room.next() == [LogLine("from afar")]


async def test_the_oldest_are_dropped_where_nobody_asks() -> None:
    room = EventQueue()
    for number in range(MAX_QUEUED_EVENTS + 5):
        room.add(LogLine(str(number)))
    news = await room.next()
    assert len(news) == MAX_QUEUED_EVENTS + 1
    assert news[0] == LogLine("5 lines before this one were dropped")
    assert news[-1] == LogLine(str(MAX_QUEUED_EVENTS + 4))
    room.add(LogLine("more"))
    assert await room.next() == [LogLine("more")]


async def test_a_failure_is_the_last_news() -> None:
    room = EventQueue()
    room.add(LogLine("before"))
    room.fail("the engine broke")
    assert await room.next() == [LogLine("before")]
    for _ in range(2):
        with pytest.raises(ActorFailed, match="the engine broke"):
            await room.next()


@pytest.fixture
def quiet_root() -> object:
    """Takes off the handlers that an actor puts on."""
    root = logging.getLogger()
    ours = logging.getLogger("penstock")
    before, level = list(root.handlers), ours.level
    yield root
    root.handlers[:] = before
    ours.setLevel(level)


async def test_warnings_reach_the_driver_with_a_name_on_them(
    quiet_root: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cluster.processes.actors.setproctitle", lambda title: None)
    actor = WorkerActor("decode worker 0, rank 0")
    asking = asyncio.create_task(actor.next_events())
    await asyncio.sleep(0)
    logging.getLogger("anything").warning("mind the gap")
    logging.getLogger("anything").info("nothing to see")
    (line,) = await asking
    assert isinstance(line, LogLine)
    assert line.text == "penstock: decode worker 0, rank 0: WARNING: mind the gap"
    assert (line.level, line.event) == ("warning", "log")
    assert line.fields == {"message": "mind the gap", "exception": None}


async def test_events_reach_the_driver_where_they_are_wanted(
    quiet_root: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cluster.processes.actors.setproctitle", lambda title: None)
    actor = WorkerActor("decode worker 0, rank 0", with_events=True)
    asking = asyncio.create_task(actor.next_events())
    await asyncio.sleep(0)
    logging.getLogger("another").info("nothing to see")
    ours = logging.getLogger("penstock.anything")
    ours.info("sequence", extra={"fields": {"request": "r-1"}})
    try:
        raise ValueError("odd")
    except ValueError:
        ours.exception("it broke")
    event, failure = await asking
    assert isinstance(event, LogLine)
    assert (event.level, event.event, event.fields) == ("info", "sequence", {"request": "r-1"})
    assert isinstance(failure, LogLine)
    assert (failure.level, failure.fields["message"]) == ("error", "it broke")
    assert "ValueError: odd" in str(failure.fields["exception"])


async def test_a_router_that_cannot_start_says_why_in_one_line(
    quiet_root: object, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr("penstock.cluster.processes.actors.setproctitle", lambda title: None)
    actor = RouterActor("router 0")
    config = RouterConfig(model=tmp_path, served_name="none")  # type: ignore[arg-type]
    with pytest.raises(ActorFailed) as failure:
        await actor.start(config)
    assert str(tmp_path) in str(failure.value)
    assert "\n" not in str(failure.value)
    with pytest.raises(RuntimeError, match="not been started"):
        await actor.drain(0.0)
    await actor.stop()
