"""`plan_changes` selects the placements that a pool fills or drains: examples, a state machine."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.cluster.autoscaling.pool_changes import Phase, PoolChanges, plan_changes

E, P, S, L, X = Phase.EMPTY, Phase.PENDING, Phase.SERVING, Phase.DRAINING, Phase.FAILED
NUM = 5


def test_lowest_free_placements_are_filled_first() -> None:
    assert plan_changes([S, E, L, E, E], 3, {}) == PoolChanges(fill=[1, 3])


def test_placements_of_draining_and_failed_workers_are_not_free() -> None:
    assert plan_changes([S, L, X], 3, {}) == PoolChanges(fill=[])


def test_pending_workers_are_drained_first_then_the_least_loaded() -> None:
    assert plan_changes([S, P, S, P], 2, {0: 9.0, 2: 1.0}).drain == [3, 1]
    assert plan_changes([S, P, S, P], 1, {0: 9.0, 2: 1.0}).drain == [3, 1, 2]
    assert plan_changes([S, S, S], 2, {0: 3.0, 1: 1.0, 2: 2.0}).drain == [1]
    assert plan_changes([S, S, S], 2, {}).drain == [2], (
        "the last of equally loaded workers, so that numbers stay low"
    )


class PoolMachine(RuleBasedStateMachine):
    """A pool whose workers start, die, drain and fail at random."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = [E] * NUM
        self.desired = 0

    def move(self, at: int, before: Phase, after: Phase) -> None:
        if self.phases[at] is before:
            self.phases[at] = after

    @rule(desired=st.integers(0, NUM + 2), loads=st.lists(st.floats(0, 9), max_size=NUM))
    def scale(self, desired: int, loads: list[float]) -> None:
        self.desired = desired
        before, load_of = self.useful, dict(enumerate(loads))
        changes = plan_changes(self.phases, desired, load_of)
        assert not (changes.fill and changes.drain)
        for at in changes.fill:
            assert self.phases[at] is E
            self.phases[at] = P
        kept = set(range(NUM)) - set(changes.drain)
        for at in changes.drain:
            assert self.phases[at] in (P, S)
            if self.phases[at] is S:
                assert not any(self.phases[other] is P for other in kept)
                serving = [load_of.get(other, 0.0) for other in kept if self.phases[other] is S]
                assert all(load_of.get(at, 0.0) <= load for load in serving)
        for at in changes.drain:
            self.phases[at] = L
        num_empty = self.phases.count(E)
        assert self.useful == desired or (self.useful < desired and not num_empty)
        assert self.useful >= min(before, desired)
        assert plan_changes(self.phases, desired, load_of) == PoolChanges(fill=[]), (
            "a second call must change nothing"
        )

    @rule(at=st.integers(0, NUM - 1))
    def becomes_ready(self, at: int) -> None:
        self.move(at, P, S)

    @rule(at=st.integers(0, NUM - 1))
    def dies(self, at: int) -> None:
        self.move(at, S, P)

    @rule(at=st.integers(0, NUM - 1))
    def has_drained(self, at: int) -> None:
        self.move(at, L, E)

    @rule(at=st.integers(0, NUM - 1))
    def fails(self, at: int) -> None:
        self.move(at, P, X)

    @property
    def useful(self) -> int:
        return self.phases.count(P) + self.phases.count(S)

    @invariant()
    def pool_has_at_most_the_desired_size(self) -> None:
        assert self.useful <= self.desired


TestPoolChanges = PoolMachine.TestCase
