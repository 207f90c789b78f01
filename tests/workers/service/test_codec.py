"""Messages to routers: each router gets the results of its own sequences."""

from penstock.workers.engine.results import StepResult
from penstock.workers.service.codec import SequenceKey, step_messages


def test_preemptions_are_sent_to_the_routers_that_hold_the_sequences() -> None:
    keys = [(1, 4, 1), (2, 4, 1), (1, 5, 1), (1, 6, 1), (1, 4, 1)]
    result = StepResult(preempted=[SequenceKey(*key) for key in keys])
    assert not result.empty
    steps = step_messages(result, lambda key: key.request != 6)
    assert {session: list(step.preempted) for session, step in steps.items()} == {
        1: [4, 5, 4],
        2: [4],
    }
