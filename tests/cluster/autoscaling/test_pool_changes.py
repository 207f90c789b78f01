"""From a number wanted to places filled and emptied, as a state machine of a pool's life."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.cluster.autoscaling.pool_changes import Phase, PoolChanges, plan_changes

E, P, S, L, X = Phase.EMPTY, Phase.PENDING, Phase.SERVING, Phase.DRAINING, Phase.FAILED
NUM = 5


def test_the_lowest_free_places_are_filled() -> None:
    assert plan_changes([S, E, L, E, E], 3, {}) == PoolChanges(fill=[1, 3])


def test_a_place_is_not_free_while_its_worker_drains_nor_once_it_is_spoilt() -> None:
    assert plan_changes([S, L, X], 3, {}) == PoolChanges(fill=[])


def test_what_does_not_serve_yet_goes_first_then_who_has_least_to_do() -> None:
    assert plan_changes([S, P, S, P], 2, {0: 9.0, 2: 1.0}).drain == [3, 1]
    assert plan_changes([S, P, S, P], 1, {0: 9.0, 2: 1.0}).drain == [3, 1, 2]
    assert plan_changes([S, S, S], 2, {0: 3.0, 1: 1.0, 2: 2.0}).drain == [1]
    assert plan_changes([S, S, S], 2, {}).drain == [2], (
        "of equals the last, so that numbers stay low"
    )


class PoolMachine(RuleBasedStateMachine):
    """A pool whose workers come, die, drain and are given up as they please."""

    def __init__(self) -> None:
        super().__init__()
        self.phases = [E] * NUM
        self.wanted = 0

    def move(self, at: int, before: Phase, after: Phase) -> None:
        if self.phases[at] is before:
            self.phases[at] = after

    @rule(wanted=st.integers(0, NUM + 2), loads=st.lists(st.floats(0, 9), max_size=NUM))
    def aim(self, wanted: int, loads: list[float]) -> None:
        self.wanted = wanted
        before, busy = self.useful, dict(enumerate(loads))
        asked = plan_changes(self.phases, wanted, busy)
        assert not (asked.fill and asked.drain)
        for at in asked.fill:
            assert self.phases[at] is E
            self.phases[at] = P
        stays = set(range(NUM)) - set(asked.drain)
        for at in asked.drain:
            assert self.phases[at] in (P, S)
            if self.phases[at] is S:
                assert not any(self.phases[other] is P for other in stays)
                serving = [busy.get(other, 0.0) for other in stays if self.phases[other] is S]
                assert all(busy.get(at, 0.0) <= load for load in serving)
        for at in asked.drain:
            self.phases[at] = L
        room = self.phases.count(E)
        assert self.useful == wanted or (self.useful < wanted and not room)
        assert self.useful >= min(before, wanted)
        assert plan_changes(self.phases, wanted, busy) == PoolChanges(fill=[]), "asked for twice"

    @rule(at=st.integers(0, NUM - 1))
    def comes(self, at: int) -> None:
        self.move(at, P, S)

    @rule(at=st.integers(0, NUM - 1))
    def dies(self, at: int) -> None:
        self.move(at, S, P)

    @rule(at=st.integers(0, NUM - 1))
    def has_drained(self, at: int) -> None:
        self.move(at, L, E)

    @rule(at=st.integers(0, NUM - 1))
    def is_given_up(self, at: int) -> None:
        self.move(at, P, X)

    @property
    def useful(self) -> int:
        return self.phases.count(P) + self.phases.count(S)

    @invariant()
    def no_more_than_were_wanted(self) -> None:
        assert self.useful <= self.wanted


TestPoolLife = PoolMachine.TestCase
