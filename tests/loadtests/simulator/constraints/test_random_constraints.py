"""Random constraints: answers drawn from the masks are valid, other texts are not."""

from collections import Counter
from random import Random

import pytest

from penstock.common.sampling_params import SamplingParams
from penstock.common.structured_outputs import StructuredOutputs, choice, json_schema
from penstock.loadtests.simulator.constraints.random_constraints import (
    LARK,
    draw_constraint,
    is_valid,
)
from penstock.loadtests.simulator.constraints.vocabulary import END, grammars, text_of
from penstock.loadtests.simulator.model.hash_model import reference_answer
from penstock.workers.scheduling.sequence import FinishReason


def test_every_complete_answer_of_a_random_constraint_is_valid() -> None:
    finishes: Counter[FinishReason] = Counter()
    for seed in range(200):
        wanted = draw_constraint(Random(seed))
        params = SamplingParams(
            max_tokens=40, stop_token_ids=(END,), min_tokens=4, structured_outputs=wanted
        )
        grammar = grammars().compile(wanted)
        answer, finish = reference_answer([seed], params, 64, 0, grammar)
        finishes[finish] += 1
        if finish is FinishReason.STOP:
            assert answer[-1] == END
            assert is_valid(wanted, text_of(answer)), (wanted, text_of(answer))
    assert finishes[FinishReason.STOP] > 150


INTEGER = json_schema({"type": "object", "properties": {"n": {"type": "integer"}}})


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        (INTEGER, b'{"n": "1"}'),
        (INTEGER, b'{"n": 1'),
        (INTEGER, b"\xff"),
        (choice(["red", "blue"]), b"reddish"),
        (StructuredOutputs("grammar", LARK), b"<<a>"),
        (StructuredOutputs("regex", "(?:re[a-d]|[0-9]{2}|é){1,3}"), b"ree"),
    ],
)
def test_a_text_of_another_form_is_not_valid(wanted: StructuredOutputs, text: bytes) -> None:
    assert not is_valid(wanted, text)
