"""Clients get a worker's message only if it contains no details about the machines."""

import pytest

from penstock.router.observability.event_log import client_safe_message


@pytest.mark.parametrize(
    "message",
    [
        "cannot read /srv/models/x",
        "tensor at 0x7f3a",
        'File "engine.py", line 3',
        "first line\nsecond line",
        "no route to 10.0.0.3:1234",
        "x" * 400,
        "",
    ],
)
def test_message_about_the_machine_is_replaced(message: str) -> None:
    assert client_safe_message(message) == "the request failed on its worker: see the server's log"


@pytest.mark.parametrize(
    "message", ["the logits were not finite", "2 workers were lost, 1.5 s ago"]
)
def test_other_message_is_passed_on(message: str) -> None:
    assert client_safe_message(message) == message
