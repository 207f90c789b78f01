"""The queue of log records, progress and failures that a process sends to the supervisor."""

import asyncio
import logging
import time
from collections import deque
from math import inf

from penstock.cluster.status.status_events import LogLine, ProcessEvent, Progress

# Largest number of unread events. If there are more, the oldest of them are dropped.
MAX_QUEUED_EVENTS = 4096
MAX_LIMITED_MESSAGES = 1024  # number of different log messages whose repetitions are counted


class ActorFailed(RuntimeError):
    """The hosted router or worker failed.

    The error has only one line of text as its argument, so that Ray can pickle it.
    """


class EventQueue:
    """A bounded queue of events for the supervisor.

    Any thread may call `add` and `fail`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: deque[ProcessEvent] = deque(maxlen=MAX_QUEUED_EVENTS)
        self._has_events = asyncio.Event()
        self._num_dropped = 0
        self._failure: ActorFailed | None = None

    def add(self, item: ProcessEvent) -> None:
        self._loop.call_soon_threadsafe(self._append, item)

    def fail(self, reason: str) -> None:
        """Report a failure. `next` returns all earlier events and then raises `ActorFailed`."""
        self._failure = ActorFailed(reason)
        self._loop.call_soon_threadsafe(self._has_events.set)

    async def next(self) -> list[ProcessEvent]:
        """Wait for events and return all new ones.

        Raises:
            ActorFailed: `fail` was called, and no events are left.
        """
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
        # If the last two unread events are progress of the same stage, keep only the newer one.
        last = self._pending[-1] if self._pending else None
        if isinstance(item, Progress) and isinstance(last, Progress) and last.stage == item.stage:
            self._pending.pop()
        self._num_dropped += len(self._pending) == MAX_QUEUED_EVENTS
        self._pending.append(item)
        self._has_events.set()


class RepeatLimit:
    """Limits how often the same log message is sent, and counts the records that are left out.

    Args:
        count: number of records of the same logger and message that are sent in each period.
        seconds: length of a period.
    """

    def __init__(self, count: int = 20, seconds: float = 60.0) -> None:
        self._count = count
        self._seconds = seconds
        # For each logger and unformatted message, the start of its period and the records in it.
        self._seen: dict[tuple[str, str], tuple[float, int]] = {}

    def admit(self, record: logging.LogRecord, now: float) -> int | None:
        """Decide whether a log record is sent.

        Returns:
            None if the record must be left out. Otherwise, the number of equal records that were
            left out in the period before.
        """
        key = (record.name, str(record.msg))
        start, number = self._seen.get(key, (-inf, 0))
        if now - start < self._seconds:
            self._seen[key] = (start, number + 1)
            return 0 if number < self._count else None
        # Remove the key and insert it again below, so that the keys stay sorted by the start of
        # their periods. The first key is then the oldest.
        self._seen.pop(key, None)
        if len(self._seen) == MAX_LIMITED_MESSAGES:
            del self._seen[next(iter(self._seen))]
        self._seen[key] = (now, 1)
        return max(0, number - self._count)


class EventLogHandler(logging.Handler):
    """Sends log records to the supervisor, prefixed with the title of the process.

    A record with an attribute `fields` is sent as an event whose name is the record's message. The
    number of other records is limited by `RepeatLimit`.
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
