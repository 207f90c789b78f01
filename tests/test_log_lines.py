"""Machine-readable logs: one line per event, whatever its fields contain."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.log_lines import EventLog, json_line, keys_line
from penstock.cluster.status import status_events

AT = 1_700_000_000.25
EVENTS: list[tuple[str, status_events.StatusEvent]] = [
    ("router 0", status_events.Progress("starting its process")),
    ("decode worker 0", status_events.Progress("weights", 1_000, 5_000)),
    ("decode worker 0", status_events.Progress("weights", 2_000, 5_000)),
    ("decode worker 0", status_events.Ready(2.5)),
    ("", status_events.Serving("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")),
    ("decode worker 0", status_events.Died("its process died (killed)", 0.5)),
    ("decode worker 0", status_events.GivenUp("no memory", 60.0)),
    ("", status_events.PoolResized("decode", "decode: 1 to 2: KV is full")),
    (
        "router 0",
        status_events.LogLine("x", "info", "request", {"request": "r-1", "seconds": 0.5}, AT),
    ),
    ("router 0", status_events.LogLine("WARNING: mind the gap")),
    ("", status_events.Draining(30.0)),
    ("decode worker 0", status_events.Waiting("weights", 20.0, "1.0 of 2.0 MB")),
    ("", status_events.Draining(25.0, 3)),
    ("router 0", status_events.RoleAssigned("decode-0", "mixed", AT, "ops")),
]


def render(form: str) -> list[str]:
    lines: list[str] = []
    events = EventLog(form, lines.append, lambda: AT + 1)  # type: ignore[arg-type]
    for title, event in EVENTS:
        events(title, event)
    events.print_line("")
    events.print_line("stopped")
    events.close()
    return lines


def test_json_lines() -> None:
    events = [json.loads(line) for line in render("json")]
    assert [(each["from"], each["event"], each["level"]) for each in events] == [
        ("router 0", "progress", "info"),
        ("decode worker 0", "progress", "info"),
        ("decode worker 0", "ready", "info"),
        ("supervisor", "serving", "info"),
        ("decode worker 0", "died", "warning"),
        ("decode worker 0", "given_up", "error"),
        ("supervisor", "decision", "info"),
        ("router 0", "request", "info"),
        ("router 0", "log", "warning"),
        ("supervisor", "draining", "info"),
        ("decode worker 0", "waiting", "info"),
        ("supervisor", "draining", "info"),
        ("router 0", "role", "info"),
        ("supervisor", "said", "info"),
    ]
    assert events[1]["bytes"] == 5_000
    assert (events[10]["left"], events[11]["requests"]) == ("1.0 of 2.0 MB", 3)
    assert events[6]["decision"] == "decode: 1 to 2: KV is full"
    assert events[7]["time"] == "2023-11-14T22:13:20.250Z", "the time of the event, not of the line"
    assert events[8]["message"] == "WARNING: mind the gap"


def test_lines_of_keys_and_values() -> None:
    lines = render("keys")
    assert lines[7] == (
        'time=2023-11-14T22:13:20.250Z level=info from="router 0" event=request '
        "request=r-1 seconds=0.5"
    )
    assert lines[4].endswith('reason="its process died (killed)" restart_seconds=0.5')
    assert lines[-1].endswith("from=supervisor event=said message=stopped")


def test_all_routers_are_listed() -> None:
    lines: list[str] = []
    EventLog("json", lines.append)(
        "", status_events.Serving("a:1", "a:2", "a:5", [("a:3", "a:4", "a:6")])
    )
    record = json.loads(lines[0])
    assert (record["http"], record["grpc"], record["admin"]) == ("a:1,a:3", "a:2,a:4", "a:5,a:6")


VALUES = st.text() | st.integers() | st.floats() | st.none()
FIELDS = st.dictionaries(st.from_regex("[a-z_]{1,9}", fullmatch=True), VALUES)


@given(FIELDS)
def test_event_is_one_line_whatever_its_fields_contain(
    fields: dict[str, status_events.Scalar],
) -> None:
    for form in ("json", "keys"):
        lines: list[str] = []
        events = EventLog(form, lines.append)
        events("who", status_events.LogLine("x", "info", "it", fields, AT))
        (line,) = lines
        assert len(line.splitlines()) == 1
        if form == "json":
            record = json.loads(line, parse_constant=pytest.fail)
            assert (record["from"], record["event"]) == ("who", "it"), (
                "fields must not override these"
            )


@given(FIELDS)
def test_keys_and_values_can_be_parsed_again(fields: dict[str, status_events.Scalar]) -> None:
    found = re.findall(r'([a-z_]+)=("(?:[^"\\]|\\.)*"|\S+)', keys_line(fields))
    decoded = {
        key: json.loads(value_text) if value_text.startswith('"') else value_text
        for key, value_text in found
    }
    assert decoded == {key: str(value) for key, value in fields.items() if value is not None}
    assert json_line({"a": 1}) == '{"a": 1}'
