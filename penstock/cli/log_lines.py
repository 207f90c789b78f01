"""Machine-readable log of `penstock serve`, with one line of key=value pairs or JSON per event."""

import json
import math
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Literal

from penstock.cluster.status import status_events
from penstock.cluster.status.status_events import Scalar

Fields = Mapping[str, Scalar]

PLAIN = re.compile(r"[^\s\"=\\]+")


def keys_line(fields: Fields) -> str:
    """Format fields as key=value pairs, and leave out fields that are None.

    Values with spaces or special characters are quoted as JSON strings.
    """
    return " ".join(f"{key}={_word(value)}" for key, value in fields.items() if value is not None)


def json_line(fields: Fields) -> str:
    return json.dumps(fields)


LINE_FORMATS: Mapping[str, Callable[[Fields], str]] = {"keys": keys_line, "json": json_line}


class EventLog:
    """Writes one line per status event.

    Args:
        line_format: format of the lines.
        write: called with each line.
        now: returns the time in seconds since 1970.
    """

    def __init__(
        self,
        line_format: Literal["keys", "json"],
        write: Callable[[str], None],
        now: Callable[[], float] = time.time,
    ) -> None:
        self._format_line = LINE_FORMATS[line_format]
        self._write = write
        self._now = now
        self._stages: dict[str, str] = {}

    def __call__(self, title: str, notice: status_events.StatusEvent) -> None:
        if isinstance(notice, status_events.Progress):
            # Byte counts change many times per second, so write only one line per stage.
            if self._stages.get(title) == notice.stage:
                return
            self._stages[title] = notice.stage
        at = notice.at if isinstance(notice, status_events.LogLine) else None
        level, event, fields = event_fields(notice)
        self._write_event(at, level, title, event, fields)

    def print_line(self, text: str) -> None:
        """Write a non-empty line of text for people as an event with the name `said`."""
        if text.strip():
            self._write_event(None, "info", "", "said", {"message": text.strip()})

    def close(self) -> None:
        pass

    def _write_event(
        self, at: float | None, level: str, title: str, event: str, fields: Fields
    ) -> None:
        when = datetime.fromtimestamp(self._now() if at is None else at, UTC)
        head = {
            "time": f"{when:%Y-%m-%dT%H:%M:%S}.{when.microsecond // 1000:03}Z",
            "level": level,
            "from": title or "supervisor",
            "event": event,
        }
        rest = {key: _rounded(value) for key, value in fields.items() if key not in head}
        self._write(self._format_line({**head, **rest}))


def event_fields(event: status_events.StatusEvent) -> tuple[str, str, Fields]:
    """Return the level, the name and the fields of an event."""
    match event:
        case status_events.Progress(stage, _, total):
            return "info", "progress", {"stage": stage, "bytes": total or None}
        case status_events.Waiting(stage, seconds, detail):
            return "info", "waiting", {"stage": stage, "seconds": seconds, "left": detail or None}
        case status_events.Ready(seconds):
            return "info", "ready", {"seconds": seconds}
        case status_events.Serving(http, grpc, admin, others):
            columns = zip((http, grpc, admin), *others, strict=True)
            names = ("http", "grpc", "admin")
            fields = {name: ",".join(each) for name, each in zip(names, columns, strict=True)}
            return "info", "serving", fields
        case status_events.Draining(seconds, requests):
            return "info", "draining", {"seconds": seconds, "requests": requests}
        case status_events.RoleAssigned(worker, role, _, by):
            return "info", "role", {"worker": worker, "role": role, "by": by}
        case status_events.PoolResized(pool, text):
            return "info", "decision", {"pool": pool, "decision": text}
        case _:
            return _warning_fields(event)


def _warning_fields(
    notice: status_events.Died
    | status_events.GivenUp
    | status_events.Stuck
    | status_events.LogLine,
) -> tuple[str, str, Fields]:
    """Return the level, the name and the fields of an event that may need attention."""
    match notice:
        case status_events.Died(reason, delay):
            return "warning", "died", {"reason": reason, "restart_seconds": delay}
        case status_events.GivenUp(reason, delay):
            return "error", "given_up", {"reason": reason, "retry_seconds": delay}
        case status_events.Stuck(worker, _, reason):
            return "warning", "stuck", {"worker": worker, "reason": reason}
        case status_events.LogLine(text, level, event, fields, _):
            return level, event, fields or {"message": text}


def _word(value: Scalar) -> str:
    text = str(value)
    return text if PLAIN.fullmatch(text) and text.isprintable() else json.dumps(text)


def _rounded(value: Scalar) -> Scalar:
    """Round a float to six digits after the decimal point, and return other values unchanged.

    NaN and infinities become strings, because JSON has no such numbers.
    """
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else str(value)
    return value
