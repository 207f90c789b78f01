"""Conditions under which a router reports that it is ready."""

from collections.abc import Sequence

import pytest

from penstock.router.observability.readiness import PARTIAL_SECONDS, Readiness


@pytest.mark.parametrize("roles", [["prefill", "decode"], ["decode", "mixed"], ["mixed"]])
def test_new_router_is_ready_once_prefill_and_decode_workers_are(roles: Sequence[str]) -> None:
    readiness = Readiness(waits_for_both=True, wakes_workers=False)
    assert readiness.not_ready_reason([], 0, 0.0) == "no worker is connected"
    assert readiness.not_ready_reason([], 2, 0.0) == "no worker is ready"
    assert readiness.not_ready_reason(roles, 2, 1.0) == ""


@pytest.mark.parametrize(("first", "missing"), [("prefill", "decode"), ("decode", "prefill")])
def test_new_router_waits_a_limited_time_for_the_missing_role(first: str, missing: str) -> None:
    readiness = Readiness(waits_for_both=True, wakes_workers=False)
    assert readiness.not_ready_reason([first], 2, 5.0) == f"no {missing} worker is ready yet"
    end = 5.0 + PARTIAL_SECONDS
    assert readiness.not_ready_reason([first], 2, end - 0.1) == f"no {missing} worker is ready yet"
    assert readiness.not_ready_reason([first], 2, end) == ""


def test_router_that_was_ready_stays_ready_with_one_role() -> None:
    readiness = Readiness(waits_for_both=True, wakes_workers=False)
    assert readiness.not_ready_reason(["prefill", "decode"], 2, 0.0) == ""
    assert readiness.not_ready_reason(["decode"], 1, 1.0) == ""
    assert readiness.not_ready_reason([], 0, 2.0) == "no worker is connected"
    assert readiness.not_ready_reason(["prefill"], 1, 3.0) == ""


def test_cluster_that_needs_one_role_is_ready_with_any_worker() -> None:
    readiness = Readiness(waits_for_both=False, wakes_workers=False)
    assert readiness.not_ready_reason(["decode"], 1, 0.0) == ""


def test_router_that_starts_workers_on_demand_is_ready_without_any() -> None:
    readiness = Readiness(waits_for_both=True, wakes_workers=True)
    assert readiness.not_ready_reason([], 0, 0.0) == ""
