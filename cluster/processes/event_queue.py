"""The queue of events that a hosted process sends to the driver: log records, progress, failure."""

import asyncio
import logging
import time
from collections import deque
from math import inf

from penstock.cluster.status.status_events import LogLine, ProcessEvent, Progress

MAX_QUEUED_EVENTS = 4096  # beyond this number, the oldest unread events are dropped
MAX_LIMITED_MESSAGES = 1024  # number of different log messages that are counted


class ActorFailed(RuntimeError):
    """The hosted router or worker failed; has only one line of text, so that Ray can pickle it."""


class EventQueue:
    """A bounded queue of events for the driver. `add` and `fail` may be called from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: deque[ProcessEvent] = deque(maxlen=MAX_QUEUED_EVENTS)
        self._has_events = asyncio.Event()
        self._num_dropped = 0
        self._failure: ActorFailed | None = None

    def add(self, item: ProcessEvent) -> None:
        self._loop.call_soon_threadsafe(self._append, item)

    def fail(self, reason: str) -> None:
        """Report a failure; `next` raises `ActorFailed` once all events have been returned."""
        self._failure = ActorFailed(reason)
        self._loop.call_soon_threadsafe(self._has_events.set)

    async def next(self) -> list[ProcessEvent]:
        """Wait for events and return all new events; raise `ActorFailed` if `fail` was called."""
        await self._has_events.wait()
        if not self._pending and self._failure is not None:
            raise self._failure
        news = list(self._pending)
        self._pending.clear()
        if self._num_dropped:
            news.insert(
                0, LogLine(f"{self._num_dropped} older events were dropped: the queue was full")
            )
            self._num_dropped = 0
        if self._failure is None:
            self._has_events.clear()
        return news

    def _append(self, item: ProcessEvent) -> None:
        # Replace an unread progress event of the same stage.
        last = self._pending[-1] if self._pending else None
        if isinstance(item, Progress) and isinstance(last, Progress) and last.stage == item.stage:
            self._pending.pop()
        self._num_dropped += len(self._pending) == MAX_QUEUED_EVENTS
        self._pending.append(item)
        self._has_events.set()


class RepeatLimit:
    """Limits how often the same log message is sent; counts the records that are left out.

    Args:
        count: records of one logger and message in each period.
        seconds: length of a period.
    """

    def __init__(self, count: int = 20, seconds: float = 60.0) -> None:
        self._count = count
        self._seconds = seconds
        # (logger, message before formatting) to (start of the period, number of records in it).
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def admit(self, record: logging.LogRecord, now: float) -> int | None:
        """Return None to leave the record out; otherwise the number of records left out before."""
        key = (record.name, str(record.msg))
        start, number = self._seen.get(key, (-inf, 0))
        if now - start < self._seconds:
            self._seen[key] = (start, number + 1)
            return 0 if number < self._count else None
        self._seen.pop(key, None)  # inserted again below: keys stay in order of periods
        if len(self._seen) == MAX_LIMITED_MESSAGES:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = (now, 1)
        return max(0, number - self._count)


class EventLogHandler(logging.Handler):
    """Sends log records to the driver, prefixed with the process's title.

    A record with an attribute `fields` is sent as an event named by the record's message. Other
    records are limited: see `RepeatLimit`.
    """

    def __init__(self, title: str, events: EventQueue, level: int) -> None:
        super().__init__(level)
        self._events = events
        self._limit = RepeatLimit()
        self.setFormatter(logging.Formatter(f"{title}: %(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.WARNING and not record.name.startswith("penstock."):
            return
        fields = getattr(record, "fields", None)
        num_left_out = 0 if fields is not None else self._limit.admit(record, time.monotonic())
        if num_left_out is None:
            return
        text, event = self.format(record), record.getMessage()
        if num_left_out:
            text += f" ({num_left_out} records like this one were left out)"
        if fields is None:
            event, fields = "log", {"message": event, "exception": record.exc_text}
        self._events.add(LogLine(text, record.levelname.lower(), event, fields, record.created))
