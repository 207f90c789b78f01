"""The log that stores the events of a background response."""

from functools import partial

import pytest

from penstock.router.api.generation.sending import FLUSH_CHARS
from penstock.router.api.responses import event_log
from penstock.router.api.responses.event_log import EventLog, EventLogs
from penstock.router.errors import Code, ServingError
from penstock.router.requests.slices import Slices


async def log_of(*fragments: str) -> EventLog:
    log = EventLog()
    await log.add(fragments, Slices())
    return log


async def test_events_are_assembled_and_an_incomplete_one_is_left_out() -> None:
    log = await log_of("a", "b", "\n\n", "", "cé\n\n", "d")
    await log.add(["e\n\n"], Slices())
    assert [b"".join(event).decode() for event in log.events] == ["ab\n\n", "cé\n\n", "e\n\n"]
    assert log.num_bytes == 12 + 3 * event_log.EVENT_OVERHEAD


async def test_large_events_stay_in_pieces() -> None:
    log = await log_of(*["x" * 1000] * 1000, "\n\n")
    (event,) = log.events
    assert max(map(len, event)) < FLUSH_CHARS + 1000
    assert sum(map(len, event)) == 1_000_002


async def test_size_of_a_log_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_EVENT_BYTES", 138)
    log = await log_of("123456\n\n")
    with pytest.raises(ServingError, match="exceed 138 bytes") as error:
        await log.add(["1\n\n"], Slices())
    assert error.value.code is Code.TOO_LARGE
    assert len(log.events) == 1


async def test_oldest_logs_are_removed() -> None:
    logs = EventLogs(max_bytes=2 * (4 + event_log.EVENT_OVERHEAD))
    for name in "abc":
        logs.put("t", name, await log_of("12\n\n"))
    assert [name for name in "abc" if logs.get("t", name)] == ["b", "c"]
    logs.delete("t", "b")
    logs.delete("t", "unknown")
    logs.put("u", "d", await log_of("12\n\n"))
    assert logs.get("t", "c") is not None
    assert logs.get("t", "d") is None
    assert logs.get("u", "d") is not None


async def test_events_of_running_responses_are_bounded_for_each_tenant_and_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = 100 + event_log.EVENT_OVERHEAD
    monkeypatch.setattr(event_log, "MAX_TENANT_BYTES", 2 * size)
    monkeypatch.setattr(event_log, "MAX_RUNNING_BYTES", 3 * size)
    memory, slices, text = event_log.EventBytes(), Slices(), "x" * 98 + "\n\n"
    logs = {name: EventLog(partial(memory.take, name)) for name in "ab"}
    await logs["a"].add([text, text], slices)
    await logs["b"].add([text], slices)
    for log in logs.values():
        with pytest.raises(ServingError, match="exceed their memory limit"):
            await log.add([text], slices)
    await logs["b"].add([text], slices, are_last=True)
    assert [len(log.events) for log in logs.values()] == [2, 2]
    for name, log in logs.items():
        memory.release(name, log.num_bytes)
    await EventLog(partial(memory.take, "a")).add([text, text], slices)
