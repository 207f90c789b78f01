"""Events that a hosted process sends to the driver."""

import asyncio
import logging

import pytest

from penstock.cluster.processes.event_queue import (
    MAX_LIMITED_MESSAGES,
    MAX_QUEUED_EVENTS,
    ActorFailed,
    EventLogHandler,
    EventQueue,
    RepeatLimit,
)
from penstock.cluster.status.status_events import LogLine, Progress


async def test_next_waits_for_events() -> None:
    queue = EventQueue()
    waiting = asyncio.create_task(queue.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    queue.add(LogLine("one"))
    queue.add(LogLine("two"))
    assert await waiting == [LogLine("one"), LogLine("two")]


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


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("any.logger", logging.WARNING, "file", 1, message, args, None)
    vars(made).update(extra)
    return made


def test_repeated_log_messages_are_limited_and_counted() -> None:
    limit = RepeatLimit(count=2, seconds=60.0)
    same = [limit.admit(record("request %s failed", n), now=10.0 + n) for n in range(7)]
    assert same == [0, 0, None, None, None, None, None]
    assert limit.admit(record("another"), now=18.0) == 0
    assert limit.admit(record("request %s failed", 8), now=69.0) is None
    assert limit.admit(record("request %s failed", 9), now=70.0) == 6
    assert limit.admit(record("request %s failed", 10), now=71.0) == 0


def test_number_of_limited_messages_is_bounded() -> None:
    limit = RepeatLimit(count=1)
    for number in range(2 * MAX_LIMITED_MESSAGES):
        assert limit.admit(record(f"message {number}"), now=0.0) == 0
    assert len(limit._seen) == MAX_LIMITED_MESSAGES


async def test_flood_of_one_warning_does_not_displace_other_events() -> None:
    queue = EventQueue()
    handler = EventLogHandler("router 0", queue, logging.INFO)
    handler.emit(record("first"))
    for _ in range(2 * MAX_QUEUED_EVENTS):
        handler.emit(record("the flood"))
    for number in range(100):
        event = record("request", fields={"number": number})
        handler.emit(event)
    events = await queue.next()
    texts = [event.text for event in events if isinstance(event, LogLine)]
    assert texts[0] == "router 0: WARNING: first"
    assert sum("the flood" in text for text in texts) == 20
    assert sum("request" in text for text in texts) == 100, "events are not limited"
