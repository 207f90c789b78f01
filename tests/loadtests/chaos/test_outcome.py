"""Effects of faults: affected streams, recovery times and allowed errors."""

import pytest

from penstock.loadtests.chaos.answers import Stream
from penstock.loadtests.chaos.faults import (
    MOMENTS,
    ON_REQUEST,
    WEIGHTS,
    Fault,
    InjectedFault,
    plan_faults,
)
from penstock.loadtests.chaos.outcome import (
    FaultEffect,
    Placement,
    by_kind,
    by_moment,
    effects_of,
    errors_of,
    table,
)
from penstock.loadtests.chaos.request_mix import ChaosRequest


def stream(name: str, began: float, ended: float, *arrivals: float) -> Stream:
    return Stream(name, ChaosRequest(0, "greedy", ""), began, ended, list(arrivals))


def injected(kind: str, worker: str, at: float, until: float | None = None) -> InjectedFault:
    fault = Fault(0, kind, "any", 0.0, 1.0)
    return InjectedFault(fault, "any", worker, worker, 7, at, at if until is None else until)


def effect_of(fault: InjectedFault, streams: list[Stream], placed: list[Placement]) -> FaultEffect:
    (found,) = effects_of([fault], streams, placed)
    return found


def test_kill_affects_running_streams_until_their_next_computed_token() -> None:
    streams = [
        stream("a", 0.0, 20.0, 1.0, 9.9, 10.1, 12.5, 13.0),
        stream("b", 0.0, 20.0, 1.0, 11.0),
        stream("over", 0.0, 9.0, 1.0),
        stream("later", 11.0, 20.0, 12.0),
    ]
    placed = [
        Placement(0.5, "d0", "a", ""),
        Placement(0.5, "d1", "b", ""),
        Placement(0.5, "d0", "over", ""),
        Placement(12.0, "d1", "a", ""),
        Placement(11.5, "d0", "later", ""),
    ]
    found = effect_of(injected("kill", "d0", 10.0), streams, placed)
    assert [each.name for each in found.streams] == ["a"]
    # The token at 10.1 s does not count as a recovery, because it was computed before the fault.
    assert found.recoveries == [pytest.approx(2.5)]


def test_stream_whose_answer_was_already_computed_needs_no_recovery() -> None:
    found = effect_of(
        injected("kill", "d0", 10.0),
        [stream("a", 0.0, 10.2, 10.1)],
        [Placement(0.5, "d0", "a", "")],
    )
    assert (len(found.streams), found.recoveries) == (1, [])


def test_recovery_from_a_pause_ends_with_the_first_token_after_it() -> None:
    found = effect_of(
        injected("pause", "d0", 10.0, 11.0),
        [stream("a", 0.0, 20.0, 9.0, 10.05, 11.2)],
        [Placement(0.5, "d0", "a", "")],
    )
    assert found.recoveries == [pytest.approx(1.2)]


def test_source_of_a_kv_transfer_is_needed_only_briefly() -> None:
    streams = [stream("a", 0.0, 20.0, 11.0)]
    placed = [Placement(1.0, "p0", "a", ""), Placement(9.9, "d0", "a", "p0")]
    assert effect_of(injected("kill", "p0", 10.0), streams, placed).streams
    assert not effect_of(injected("kill", "p0", 10.5), streams, placed).streams
    assert effect_of(injected("kill", "d0", 10.5), streams, placed).streams
    assert not effect_of(injected("kill", "d0", 0.5), streams, placed).streams


def test_killed_router_affects_all_open_streams() -> None:
    streams = [stream("a", 0.0, 20.0, 15.0), stream("b", 12.0, 20.0)]
    assert len(effect_of(injected("kill router", "", 10.0), streams, []).streams) == 1


def test_error_is_allowed_only_if_two_workers_were_lost() -> None:
    streams = [stream("once", 0.0, 20.0), stream("twice", 0.0, 20.0)]
    for each in streams:
        each.error = "INTERNAL: 2 workers were lost while running this request"
    effects = [
        FaultEffect(injected("kill", "d0", 1.0), streams),
        FaultEffect(injected("pause", "d1", 2.0), streams),
        FaultEffect(injected("cut stream", "d1", 3.0), streams[1:]),
    ]
    wrong, allowed = errors_of(streams, effects, [Placement(0.5, "d0", "once", "")])
    assert [each.partition(":")[0] for each in wrong] == ["once"]
    assert wrong[0].endswith(
        "(0.50 s to d0, 1.00 s kill d0, 2.00 s pause d1, 3.00 s cut stream d1)"
    )
    assert [each.partition(":")[0] for each in allowed] == ["twice"]


def test_placement_on_a_lost_worker_before_detection_counts_as_a_loss() -> None:
    (late,) = streams = [stream("late", 0.0, 60.0)]
    late.error = "INTERNAL: 2 workers were lost while running this request"
    placed = [Placement(1.5, "d0", "late", ""), Placement(9.0, "d1", "late", "")]
    kill, cut = injected("kill", "d0", 1.0), injected("cut stream", "d1", 5.0)
    assert not errors_of(streams, [FaultEffect(kill), FaultEffect(cut)], placed)[1]
    freeze = injected("freeze", "d1", 5.0)
    assert errors_of(streams, [FaultEffect(kill), FaultEffect(freeze)], placed)[1]
    router = FaultEffect(injected("kill router", "", 2.0), streams)
    assert not errors_of(streams, [FaultEffect(kill), router], placed)[1]


def test_effects_are_summed_by_kind_and_by_moment_and_tabulated() -> None:
    effects = [
        FaultEffect(injected("kill", "d0", 1.0), [stream("a", 0.0, 9.0)], [1.0, 3.0]),
        FaultEffect(injected("kill", "d0", 2.0)),
        FaultEffect(injected("pause", "d0", 3.0), [stream("a", 0.0, 9.0)], [0.5]),
    ]
    found = by_kind(effects)
    assert (found["kill"]["faults"], found["kill"]["hit"], found["kill"]["recovered"]) == (2, 1, 2)
    assert found["kill"]["recovery_seconds"]["p50"] == 2.0
    assert found["all"]["recovery_seconds"]["max"] == 3.0
    assert by_moment(effects)["any"] == found["all"]
    lines = table(found, "fault")
    assert len(lines) == 4
    assert lines[-1].split()[:3] == ["all", "3", "2"]
    assert "-" in "".join(table(by_kind(effects[1:2]), "fault"))


def test_plan_has_every_kind_and_depends_only_on_the_seed() -> None:
    plan = plan_faults(300, 5, ["ray kill"])
    kinds = [fault.kind for fault in plan]
    assert set(kinds) == {*WEIGHTS, "ray kill"}
    assert set(kinds[: len(WEIGHTS) + 1]) == set(kinds), (
        "every kind must occur once before one repeats"
    )
    assert {fault.moment for fault in plan} == set(MOMENTS)
    assert plan == plan_faults(300, 5, ["ray kill"])
    assert plan != plan_faults(300, 6, ["ray kill"])
    assert plan_faults(8, 5, ["ray kill"]) == plan[:8]
    assert not set(ON_REQUEST) & {fault.kind for fault in plan_faults(300, 5, [])}
