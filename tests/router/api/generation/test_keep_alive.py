"""Times at which a stream sends events that keep its connection alive."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.router.api.generation import response
from penstock.router.api.generation.response import GenerationResponse


class Ended(Exception):
    """The test has seen enough waits."""


class Clock:
    """A clock that advances only while the stream waits for a token that does not come."""

    def __init__(self, now: float, written_at: list[float]) -> None:
        self.now = now
        self.waits: list[float] = []
        self.writer = SimpleNamespace(written_at=written_at[0])
        self._written_at = written_at[1:]

    def timeout(self, seconds: float) -> Any:
        """Let `seconds` pass; a token may have been written meanwhile."""
        if len(self.waits) == len(self._written_at) + 1:
            raise Ended
        self.waits.append(seconds)
        self.now += seconds
        if len(self.waits) <= len(self._written_at):
            self.writer.written_at = self._written_at[len(self.waits) - 1]
        raise TimeoutError


async def test_ping_follows_ten_seconds_after_the_last_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The last token before the first wait was written at 97 s, and one during this wait at 105 s.
    clock = Clock(100.0, [97.0, 105.0, 105.0])
    pings: list[float] = []
    monkeypatch.setattr(response, "monotonic", lambda: clock.now)
    monkeypatch.setattr(asyncio, "timeout", clock.timeout)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            pings.append(clock.now)

    deltas: Any = SimpleNamespace()
    formatter: Any = SimpleNamespace()
    stream = GenerationResponse(deltas, formatter, "id", True, keep_alive=lambda: "event: ping\n\n")
    writer: Any = clock.writer
    with pytest.raises(Ended):
        await stream._next_delta(send, writer)
    assert clock.waits == [7.0, 8.0, 10.0]
    assert pings == [115.0, 125.0]
