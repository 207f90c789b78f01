"""`step_work` returns the same counts as a loop over every token of a plan."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.step_work import step_work
from tests.support.batcher_bench import limits, sequence


@given(st.lists(st.integers(1, 20), min_size=1, max_size=4))
def test_work_of_a_plan_is_the_sum_over_its_tokens(prompts: list[int]) -> None:
    batcher = Batcher(limits())
    for number, length in enumerate(prompts):
        batcher.submit(sequence(number, [7 + number] * length))
    while (plan := batcher.plan()) is not None:
        work = step_work(plan)
        starts = plan.query_starts.tolist()
        sizes = [end - start for start, end in pairwise(starts)]
        attended = [
            plan.positions[start : start + size] + 0.5
            for start, size in zip(starts, sizes, strict=False)
            if size > 1
        ]
        assert (work.tokens, work.sequences) == (len(plan.tokens), len(plan.rows))
        assert work.positions == plan.context_lens.sum()
        assert work.pairs == sum(float(each.sum()) for each in attended)
        batcher.commit(plan, plan.sampling_rows * 0 + 1)
