"""Pipeline parallelism: several steps in flight, each with different sequences."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.sampling_params import SamplingParams
from penstock.workers.scheduling.batcher import Batcher, SchedulerConfig
from penstock.workers.scheduling.sequence import FinishReason, NewSequence, Sibling, StepPlan

SEQUENCE = st.tuples(st.integers(1, 20), st.integers(1, 8), st.integers(1, 3))
SEQUENCES = st.lists(SEQUENCE, min_size=1, max_size=7)


def make_sequence(key: int, num_prompt: int, num_new: int, choices: int) -> NewSequence:
    prompt = [(key * 31 + i) % 90 for i in range(num_prompt)]
    params = SamplingParams(temperature=0.0, max_tokens=num_new)
    siblings = tuple(Sibling(choice, prompt) for choice in range(1, choices))
    return NewSequence(key, prompt, num_prompt, params, siblings=siblings)


class Pipeline:
    """Plans as many steps as possible, then commits the oldest step, in a loop."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.in_flight: list[StepPlan] = []
        self.most_in_flight = 0
        self.counts: dict[tuple[object, int], int] = {}

    def advance(self) -> bool:
        while (plan := self.batcher.plan()) is not None:
            busy = [set(other.rows.tolist()) for other in self.in_flight]
            assert not any(set(plan.rows.tolist()) & rows for rows in busy)
            self.in_flight.append(plan)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        if not self.in_flight:
            return False
        plan = self.in_flight.pop(0)
        output = self.batcher.commit(plan, np.full(len(plan.sampling_rows), 7, np.int32))
        for key, choice, finish in zip(output.keys, output.choices, output.finishes, strict=True):
            name = key, int(choice)
            self.counts[name] = self.counts.get(name, 0) + 1
            assert finish in (FinishReason.NONE, FinishReason.LENGTH)
        self.batcher.check()
        return True


@given(SEQUENCES, st.integers(2, 4), st.integers(12, 40), st.integers(8, 20))
def test_every_sequence_ends_with_all_its_tokens(
    sequences: list[tuple[int, int, int]], stages: int, num_blocks: int, budget: int
) -> None:
    limits = SchedulerConfig(num_blocks, 64, 4, 8, budget, num_stages=stages)
    batcher = Batcher(limits)
    for key, (num_prompt, num_new, choices) in enumerate(sequences):
        batcher.submit(make_sequence(key, num_prompt, num_new, choices))
    pipeline = Pipeline(batcher)
    while pipeline.advance():
        assert len(pipeline.in_flight) < stages
    expected = {
        (key, choice): num_new
        for key, (_, num_new, choices) in enumerate(sequences)
        for choice in range(choices)
    }
    assert pipeline.counts == expected
    load = batcher.load()
    assert (load.running, load.queued, load.used_blocks) == (0, 0, 0)


def test_running_sequences_are_divided_among_the_steps_in_flight() -> None:
    batcher = Batcher(SchedulerConfig(64, 64, 4, 8, 32, num_stages=4))
    for key in range(8):
        batcher.submit(make_sequence(key, 4, 6, 1))
    pipeline = Pipeline(batcher)
    sizes = []
    while pipeline.advance():
        sizes.append([len(plan.rows) for plan in pipeline.in_flight])
    assert pipeline.most_in_flight == 4
    assert [2, 2, 2] in sizes


def test_sequence_dropped_in_flight_is_removed_with_its_step() -> None:
    batcher = Batcher(SchedulerConfig(64, 64, 4, 8, 32, num_stages=2))
    for key in range(4):
        batcher.submit(make_sequence(key, 4, 6, 1))
    pipeline = Pipeline(batcher)
    pipeline.advance()
    batcher.drop(0)
    batcher.drop(3)
    while pipeline.advance():
        pass
    assert pipeline.counts[1, 0] == pipeline.counts[2, 0] == 6
    assert pipeline.counts.get((0, 0), 0) <= 1
    assert batcher.load().used_blocks == 0
