"""A simulation that leaves out the tokens of prompts gives the same results as a full one."""

import numpy as np
import pytest

from penstock.loadtests.bench.workload import Planned
from penstock.loadtests.simulator.model.timed_model import TimedModel
from penstock.loadtests.simulator.model.timed_table import TimedTable
from penstock.loadtests.simulator.model.timing import Timing
from penstock.loadtests.simulator.scaling.cluster import Cluster, ClusterPlan
from penstock.loadtests.simulator.scaling.scalers import Static
from penstock.workers.scheduling.config import SchedulerConfig
from penstock.workers.scheduling.sequence import NEVER

LIMITS = SchedulerConfig(
    num_blocks=80,
    max_model_len=2048,
    block_size=16,
    max_sequences=4,
    max_batched_tokens=64,
    max_queued=10**6,
)


def run() -> Cluster:
    load = [Planned(number, 0.1 * number, 600, 9, (number % 3, number)) for number in range(12)]
    plan = ClusterPlan({"mixed": 2}, LIMITS, Timing())
    cluster = Cluster(plan, load, Static(plan.pools))
    cluster.run()
    return cluster


def test_results_are_those_of_plans_with_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    short = run()
    tables = [worker.batcher.table for worker in short._live.values()]
    assert all(isinstance(table, TimedTable) for table in tables)
    of = TimedModel.__init__

    def reading(model: TimedModel, timing: Timing, seed: int, worker: str) -> None:
        of(model, timing, seed, worker)
        model.reads_tokens = True

    monkeypatch.setattr(TimedModel, "__init__", reading)
    whole = run()
    assert not any(isinstance(one.batcher.table, TimedTable) for one in whole._live.values())
    assert short.calls == whole.calls
    assert short.clock.num_events == whole.clock.num_events
    loads = [[worker.batcher.load() for worker in one._live.values()] for one in (short, whole)]
    assert loads[0] == loads[1]


def test_only_plans_with_prompts_lack_tokens() -> None:
    table = TimedTable.of(LIMITS)
    table.prompt_known[:] = NEVER
    table.tokens[:] = 7
    rows = np.array([1, 3], np.int32)
    table.num_computed[rows], table.num_tokens[rows], table.num_blocks[rows] = 20, 30, 2
    prompts = table.pack(1, rows, np.array([1, 10], np.int32))
    assert prompts.tokens.tolist() == prompts.positions.tolist() == [0] * 11
    assert prompts.query_starts.tolist() == [0, 1, 11]
    decodes = table.pack(2, rows, np.array([1, 1], np.int32))
    assert decodes.tokens.tolist() == [7, 7]
    assert decodes.positions.tolist() == [20, 20]


def test_plans_with_logprobs_of_prompts_have_their_tokens() -> None:
    table = TimedTable.of(LIMITS)
    table.prompt_known[:] = NEVER
    table.prompt_known[2], table.num_prompt[2] = 1, 8
    table.num_tokens[2], table.num_blocks[2] = 8, 1
    plan = table.pack(1, np.array([2], np.int32), np.array([8], np.int32))
    assert plan.positions.tolist() == list(range(8))
    assert plan.scored.tolist() == list(range(7))
