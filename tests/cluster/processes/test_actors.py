"""Events that a hosted process sends to the driver, without Ray."""

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


async def test_next_waits_for_events() -> None:
    queue = EventQueue()
    waiting = asyncio.create_task(queue.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.add(LogLine("one"))
    queue.add(LogLine("two"))
    assert await waiting == [LogLine("one"), LogLine("two")]


class Node:
    """An object that can be part of a reference cycle."""

    other: "Node"


def test_freeze_heap_excludes_present_objects_from_later_collections() -> None:
    before = gc.get_freeze_count()
    try:
        dead, kept = Node(), Node()
        dead.other, kept.other = dead, kept
        gone = weakref.ref(dead)
        del dead
        freeze_heap()
        assert gone() is None, "unreachable cycles are collected first"
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


async def test_only_the_latest_progress_of_a_stage_is_kept() -> None:
    queue = EventQueue()
    for done in range(10):
        queue.add(Progress("weights", done, 10))
    queue.add(Progress("warming up"))
    assert await queue.next() == [Progress("weights", 9, 10), Progress("warming up")]


async def test_events_can_be_added_from_any_thread() -> None:
    queue = EventQueue()
    await asyncio.to_thread(queue.add, LogLine("from a thread"))
    assert await queue.next() == [LogLine("from a thread")]


async def test_oldest_events_of_a_full_queue_are_dropped() -> None:
    queue = EventQueue()
    for number in range(MAX_QUEUED_EVENTS + 5):
        queue.add(LogLine(str(number)))
    events = await queue.next()
    assert len(events) == MAX_QUEUED_EVENTS + 1
    assert events[0] == LogLine("5 older events were dropped: the queue was full")
    assert events[-1] == LogLine(str(MAX_QUEUED_EVENTS + 4))
    queue.add(LogLine("more"))
    assert await queue.next() == [LogLine("more")]


async def test_next_raises_the_failure_after_the_last_event() -> None:
    queue = EventQueue()
    queue.add(LogLine("before"))
    queue.fail("the engine broke")
    assert await queue.next() == [LogLine("before")]
    for _ in range(2):
        with pytest.raises(ActorFailed, match="the engine broke"):
            await queue.next()


@pytest.fixture
def quiet_root() -> object:
    """Remove the log handlers that an actor adds, after the test."""
    root = logging.getLogger()
    own_logger = logging.getLogger("penstock")
    before, level = list(root.handlers), own_logger.level
    yield root
    root.handlers[:] = before
    own_logger.setLevel(level)


async def test_warnings_reach_the_driver_with_the_name_of_the_process(
    quiet_root: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cluster.processes.actors.setproctitle", lambda title: None)
    actor = WorkerActor("decode worker 0, rank 0")
    waiting = asyncio.create_task(actor.next_events())
    await asyncio.sleep(0)
    logging.getLogger("anything").warning("mind the gap")
    logging.getLogger("anything").info("nothing to see")
    (line,) = await waiting
    assert isinstance(line, LogLine)
    assert line.text == "penstock: decode worker 0, rank 0: WARNING: mind the gap"
    assert (line.level, line.event) == ("warning", "log")
    assert line.fields == {"message": "mind the gap", "exception": None}


async def test_log_events_reach_the_driver_if_enabled(
    quiet_root: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cluster.processes.actors.setproctitle", lambda title: None)
    actor = WorkerActor("decode worker 0, rank 0", with_events=True)
    waiting = asyncio.create_task(actor.next_events())
    await asyncio.sleep(0)
    logging.getLogger("another").info("nothing to see")
    own_logger = logging.getLogger("penstock.anything")
    own_logger.info("sequence", extra={"fields": {"request": "r-1"}})
    try:
        raise ValueError("odd")
    except ValueError:
        own_logger.exception("it broke")
    event, failure = await waiting
    assert isinstance(event, LogLine)
    assert (event.level, event.event, event.fields) == ("info", "sequence", {"request": "r-1"})
    assert isinstance(failure, LogLine)
    assert (failure.level, failure.fields["message"]) == ("error", "it broke")
    assert "ValueError: odd" in str(failure.fields["exception"])


async def test_router_that_cannot_start_gives_a_one_line_reason(
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
