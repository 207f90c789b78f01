"""Merging of the role assignments that different operators made."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.router.observability.role_registry import (
    ROLES,
    Assignment,
    RoleRegistry,
    covers,
    merged,
    successor,
)

ASSIGNMENTS = st.dictionaries(
    st.sampled_from("abc"),
    st.builds(Assignment, st.sampled_from(ROLES), st.floats(0, 4), st.sampled_from(["ops", "ada"])),
)


@given(ASSIGNMENTS, ASSIGNMENTS, ASSIGNMENTS)
def test_merge_does_not_depend_on_the_order(
    one: dict[str, Assignment], other: dict[str, Assignment], third: dict[str, Assignment]
) -> None:
    whole = merged(one, other, third)
    assert merged(third, merged(other, one)) == whole
    assert merged(merged(one, third), other, one) == whole
    assert merged(whole, one) == whole
    for worker, assignment in whole.items():
        reported = [source[worker] for source in (one, other, third) if worker in source]
        assert assignment in reported
        assert assignment.at == max(each.at for each in reported)


@given(st.lists(st.tuples(st.integers(0, 2), ASSIGNMENTS), max_size=8))
def test_routers_converge_when_they_are_polled_in_turn(
    reports: list[tuple[int, dict[str, Assignment]]],
) -> None:
    registry, routers = RoleRegistry(), [dict[str, Assignment](), {}, {}]
    for index, reported in reports:
        routers[index] = merged(routers[index], reported)
    for _ in range(2):
        for index, known in enumerate(routers):
            if not registry.merge(known):
                routers[index] = merged(known, registry.assignments)
    assert routers[0] == routers[1] == routers[2] == registry.assignments
    assert all(registry.merge(known) for known in routers)
    assert registry.assignments == merged(*(reported for _, reported in reports))


def order(each: Assignment) -> tuple[float, str, str]:
    return each.at, each.role, each.by


@given(ASSIGNMENTS, ASSIGNMENTS)
def test_held_assignments_cover_those_that_are_not_newer(
    held: dict[str, Assignment], given: dict[str, Assignment]
) -> None:
    assert covers(merged(held, given), given)
    newer = [
        worker
        for worker, each in given.items()
        if worker not in held or order(each) > order(held[worker])
    ]
    assert covers(held, given) == (not newer)


@given(ASSIGNMENTS, st.sampled_from(ROLES), st.floats(0, 4))
def test_successor_is_newer_even_if_the_previous_clock_was_ahead(
    held: dict[str, Assignment], role: str, now: float
) -> None:
    assignment = successor(held.get("a"), role, now, "ops")
    assert merged(held, {"a": assignment})["a"] == assignment
    assert assignment.at >= now
    assert assignment.by == "ops"
