"""Decides whether a call may have failed because no router ran."""

import pytest

from penstock.loadtests.chaos.clients import RECONNECT_SECONDS, router_was_down


@pytest.mark.parametrize(
    ("began", "expected"),
    [
        (5.0, True),  # the router is killed at 10.0, during the call
        (10.5, True),  # no router is running
        (100.0, True),  # the next router is ready at 120.0
        (120.0 + RECONNECT_SECONDS - 0.1, True),
        (120.0 + RECONNECT_SECONDS + 0.1, False),
    ],
)
def test_call_may_fail_until_clients_can_reach_the_next_router(
    began: float, expected: bool
) -> None:
    assert router_was_down(began, killed=[10.0], ready=[1.0, 120.0]) == expected


def test_router_that_is_not_ready_again_is_down() -> None:
    assert router_was_down(1e6, killed=[10.0], ready=[1.0])
    assert not router_was_down(1e6, killed=[], ready=[1.0])
