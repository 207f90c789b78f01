"""Both sides of the KV transfer protocol with any order of messages, reports, faults and timeouts.

`TransferWorld` checks the results after every step.
"""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.support.transfer_world import SECONDS, TransferWorld

MAX_FAULTS = 2  # with more faults in one run, hardly any transfer would succeed


class Interleavings(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = TransferWorld()
        self.num_faults = 0
        self.rng = Random(0)

    @initialize(seed=st.integers(0, 2**32))
    def choose_order(self, seed: int) -> None:
        self.rng = Random(seed)

    @rule(
        num_units=st.integers(1, 5),
        first=st.integers(0, 2),
        is_ragged=st.booleans(),
        is_sent=st.sampled_from([True, True, False]),
    )
    def open(self, num_units: int, first: int, is_ragged: bool, is_sent: bool) -> None:
        start, stop = 2 * first, 2 * (first + num_units) - is_ragged
        epoch = self.world.open(start, stop)
        if is_sent:
            self.world.send(epoch, epoch, stop)

    @precondition(lambda self: self.world.expected)
    @rule(data=st.data(), extra=st.sampled_from([0, 2]), is_known=st.booleans())
    def send(self, data: st.DataObject, extra: int, is_known: bool) -> None:
        """Send a transfer too late, a second time, with another length, or for an unknown epoch."""
        epoch = data.draw(st.sampled_from(sorted(self.world.expected)))
        self.world.send(epoch, epoch if is_known else 999, self.world.expected[epoch].stop + extra)

    @precondition(lambda self: self.world.expected)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.world.close(data.draw(st.sampled_from(sorted(self.world.expected))))

    @precondition(lambda self: any(each.pinned for each in self.world.channels))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        pinned = [each for channel in self.world.channels for each in channel.pinned]
        data.draw(st.sampled_from(pinned)).aborted = True

    @rule(seconds=st.sampled_from([0.1, SECONDS / 3]))
    def wait(self, seconds: float) -> None:
        self.world.wait(seconds)

    @rule(num_steps=st.integers(1, 40))
    def progress(self, num_steps: int) -> None:
        """Execute steps in random order."""
        for _ in range(num_steps):
            steps = self.world.possible_steps()
            if not steps:
                return
            self.rng.choice(steps)()

    # ------------------------------------------------------------ faults

    @precondition(lambda self: self.num_faults < MAX_FAULTS)
    @rule(fault=st.sampled_from(["flip", "twice", "fail"]))
    def disturb_next_piece(self, fault: str) -> None:
        """Flip a bit of the next data message, send the message twice, or do not send it."""
        self.num_faults += 1
        self.world.fault = fault

    @precondition(lambda self: self.num_faults < MAX_FAULTS)
    @rule()
    def restart_source(self) -> None:
        self.num_faults += 1
        self.world.restart_source()

    @precondition(lambda self: self.world.channels and self.num_faults < MAX_FAULTS)
    @rule(data=st.data())
    def break_channel(self, data: st.DataObject) -> None:
        self.num_faults += 1
        self.world.break_channel(data.draw(st.sampled_from(self.world.channels)))

    @precondition(lambda self: self.num_faults < MAX_FAULTS)
    @rule()
    def pause(self) -> None:
        """Let enough time pass for transfers to time out."""
        self.num_faults += 1
        self.world.wait(SECONDS)

    # ------------------------------------------------------------ checks

    @invariant()
    def some_steps_follow(self) -> None:
        self.progress(self.rng.choice([0, 1, 3, 10]))

    @invariant()
    def windows_are_bounded(self) -> None:
        for channel in self.world.channels:
            channel.check_windows()

    def teardown(self) -> None:
        self.world.finish()


Interleavings.TestCase.settings = settings(max_examples=300, stateful_step_count=30, deadline=None)
TestInterleavings = Interleavings.TestCase


def test_undisturbed_transfers_succeed_in_any_order() -> None:
    for seed in range(20):
        world, rng = TransferWorld(), Random(seed)
        for first in range(4):
            epoch = world.open(2 * first, 2 * first + 9)
            world.send(epoch, epoch, 2 * first + 9)
        while steps := world.possible_steps():
            rng.choice(steps)()
            world.channels[0].check_windows()
        # All four transfers succeed. Two of them start in the middle of a block of the source.
        assert [result.reason for result in world.results.values()] == [""] * 4
