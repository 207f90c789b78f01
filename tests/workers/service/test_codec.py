"""Messages to routers: each router gets the results of its own sequences."""

import pytest

from penstock.protos import worker_pb2 as wire
from penstock.workers.engine.results import StepResult
from penstock.workers.service.codec import (
    BadSubmit,
    SequenceKey,
    Vocabulary,
    new_sequence,
    step_messages,
)


def test_preemptions_are_sent_to_the_routers_that_hold_the_sequences() -> None:
    keys = [(1, 4, 1), (2, 4, 1), (1, 5, 1), (1, 6, 1), (1, 4, 1)]
    result = StepResult(preempted=[SequenceKey(*key) for key in keys])
    assert not result.empty
    steps = step_messages(result, lambda key: key.request != 6)
    assert {session: list(step.preempted) for session, step in steps.items()} == {
        1: [4, 5, 4],
        2: [4],
    }


def test_prompt_that_is_not_whole_tokens_is_refused() -> None:
    submit = wire.Submit(request=4, attempt=1, prompt=b"12345")
    with pytest.raises(BadSubmit, match="the prompt has 5 bytes: expected a multiple of 4"):
        new_sequence(submit, SequenceKey(1, 4, 1), Vocabulary(100, (1,)), 0)
