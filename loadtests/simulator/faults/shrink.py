"""Shrinks a failing schedule: removes requests and faults while the schedule still fails."""

from collections.abc import Callable, Sequence

from penstock.loadtests.simulator.faults.schedule_run import InvariantViolated, ScheduleRun
from penstock.loadtests.simulator.faults.schedules import Schedule


def failure_of(schedule: Schedule) -> str:
    """Return the reason why the schedule fails, or "" if it passes."""
    try:
        ScheduleRun(schedule).play()
    except InvariantViolated as broken:
        return str(broken)
    return ""


def shrunk(schedule: Schedule, fails: Callable[[Schedule], object] = failure_of) -> Schedule:
    """Return a minimal failing part of a schedule.

    The part passes if any one of its requests or faults is removed.
    """
    size = -1
    while size != len(schedule.requests) + len(schedule.faults):
        size = len(schedule.requests) + len(schedule.faults)
        schedule = _without_faults(schedule, fails)
        schedule = _without_requests(schedule, fails)
    return schedule


def _without_faults(schedule: Schedule, fails: Callable[[Schedule], object]) -> Schedule:
    numbers = [fault.number for fault in schedule.faults]
    return schedule.only(faults=_fewest(numbers, lambda kept: fails(schedule.only(faults=kept))))


def _without_requests(schedule: Schedule, fails: Callable[[Schedule], object]) -> Schedule:
    numbers = [request.number for request in schedule.requests]
    kept = _fewest(numbers, lambda kept: fails(schedule.only(requests=kept)))
    return schedule.only(requests=kept)


def _fewest(numbers: list[int], fails: Callable[[Sequence[int]], object]) -> list[int]:
    """Remove parts of `numbers` while the rest still fails, and return the rest.

    The parts are halves, then quarters, and so on down to single numbers.
    """
    step = len(numbers)
    while step:
        start = 0
        while start < len(numbers):
            without = numbers[:start] + numbers[start + step :]
            if fails(without):
                numbers = without
            else:
                start += step
        step //= 2
    return numbers


def command_of(schedule: Schedule) -> str:
    """Return the command line that runs exactly this schedule again."""
    requests = ",".join(str(request.number) for request in schedule.requests) or "none"
    faults = ",".join(str(fault.number) for fault in schedule.faults) or "none"
    return (
        f"penstock simulate faults --seed {schedule.seed} --requests {requests} --faults {faults}"
    )
