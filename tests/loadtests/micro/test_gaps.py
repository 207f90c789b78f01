"""The measurement of the time between steps."""

import pytest

from penstock.loadtests.bench.workload import Prompts
from penstock.loadtests.micro.ab_runner import SHIPPED_MODEL
from penstock.loadtests.micro.gaps import Load, figures, run_round
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(WorkerConfig("w", SHIPPED_MODEL, threads=1, kv_cache_mib=16))


def test_both_kinds_measure_every_step_and_its_gap(engine: Engine) -> None:
    load = Load(concurrency=3, input_len=20, output_len=12)
    prompts = Prompts(range(200), 0)
    rounds = [run_round(engine, prompts, load, n, kind) for n, kind in enumerate(KINDS)]
    for steps in rounds:
        assert len(steps.gaps) == len(steps.steps) == 12
        assert min(steps.gaps[1:]) > 0
        found = figures([steps])
        assert 0 < found["fraction"]["median"] < 1
        assert 0 < found["gap_p50_us"] <= found["gap_p99_us"]
    engine.batcher.check()


KINDS = ("one_by_one", "pipelined")
