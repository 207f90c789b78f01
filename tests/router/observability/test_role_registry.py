"""What operators said of roles, merged."""

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
    st.builds(Assignment, st.sampled_from(ROLES), st.floats(0, 4)),
)


@given(ASSIGNMENTS, ASSIGNMENTS, ASSIGNMENTS)
def test_in_whatever_order_they_hear_of_it_all_end_the_same(
    one: dict[str, Assignment], other: dict[str, Assignment], third: dict[str, Assignment]
) -> None:
    whole = merged(one, other, third)
    assert merged(third, merged(other, one)) == whole
    assert merged(merged(one, third), other, one) == whole
    assert merged(whole, one) == whole
    for worker, assignment in whole.items():
        said = [part[worker] for part in (one, other, third) if worker in part]
        assert assignment in said
        assert assignment.at == max(each.at for each in said)


@given(st.lists(st.tuples(st.integers(0, 2), ASSIGNMENTS), max_size=8))
def test_routers_that_are_looked_at_in_turn_end_the_same(
    words: list[tuple[int, dict[str, Assignment]]],
) -> None:
    book, routers = RoleRegistry(), [dict[str, Assignment](), {}, {}]
    for at, said in words:
        routers[at] = merged(routers[at], said)
    for _ in range(2):
        for at, known in enumerate(routers):
            if not book.merge(known):
                routers[at] = merged(known, book.assignments)
    assert routers[0] == routers[1] == routers[2] == book.assignments
    assert all(book.merge(known) for known in routers)
    assert book.assignments == merged(*(said for _, said in words))


@given(ASSIGNMENTS, ASSIGNMENTS)
def test_held_assignments_cover_what_is_no_newer(
    held: dict[str, Assignment], given: dict[str, Assignment]
) -> None:
    assert covers(merged(held, given), given)
    newer = [
        worker
        for worker, each in given.items()
        if worker not in held or (each.at, each.role) > (held[worker].at, held[worker].role)
    ]
    assert covers(held, given) == (not newer)


@given(ASSIGNMENTS, st.sampled_from(ROLES), st.floats(0, 4))
def test_successor_counts_although_the_clock_before_was_ahead(
    held: dict[str, Assignment], role: str, now: float
) -> None:
    assignment = successor(held.get("a"), role, now)
    assert merged(held, {"a": assignment})["a"] == assignment
    assert assignment.at >= now
