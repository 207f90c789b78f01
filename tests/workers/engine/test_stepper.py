"""OverlapStepper: steps planned ahead give the same tokens as steps run one by one."""

from pathlib import Path

import pytest
import torch

from penstock.common.sampling_params import SamplingParams
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.scheduling.sequence import NewSequence
from tests.support.engines import run_out
from tests.support.stepper_driver import StepperDriver
from tests.support.tiny import tiny_checkpoint

PROMPTS = [list(range(3 + 7 * i, 20 + 9 * i)) for i in range(4)]


def sequences() -> list[NewSequence]:
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=40),
        SamplingParams(temperature=0.9, seed=5, max_tokens=30, logprobs=2),
        SamplingParams(temperature=0.8, seed=7, max_tokens=25, repetition_penalty=1.3),
        SamplingParams(
            temperature=1.0, seed=9, max_tokens=50, stop_token_ids=tuple(range(0, 90, 3))
        ),
    ]
    return [
        NewSequence(i, prompt, len(prompt), params)
        for i, (prompt, params) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def make_engine(checkpoint: Path) -> Engine:
    return Engine(
        WorkerConfig("w", checkpoint, kv_cache_mib=1, max_sequences=8, max_batched_tokens=32)
    )


@pytest.fixture(params=["a thread computes", "a device computes"])
def engine(checkpoint: Path, request: pytest.FixtureRequest) -> Engine:
    """An engine that plans ahead, with a compute thread or with a CPU that acts as a GPU."""
    engine = make_engine(checkpoint)
    engine.plans_ahead = True
    engine.executor.on_device = request.param == "a device computes"
    return engine


def test_answers_equal_those_of_steps_run_one_by_one(engine: Engine, checkpoint: Path) -> None:
    one_by_one = make_engine(checkpoint)
    for new in sequences():
        one_by_one.submit(new)
    expected = run_out(one_by_one)
    driver = StepperDriver(engine)
    for new in sequences():
        driver.advance(lambda engine, new=new: engine.submit(new))  # type: ignore[misc]
    while driver.num_ended < len(PROMPTS):
        driver.advance()
    assert driver.answers == expected
    assert driver.num_ahead > 5
    driver.stepper.stop()
    engine.batcher.check()


def test_command_withdraws_the_step_planned_ahead(engine: Engine) -> None:
    driver = StepperDriver(engine)
    first, second, *_ = sequences()
    driver.advance(lambda engine: engine.submit(first))
    for _ in range(5):
        driver.advance()
    driver.advance(lambda engine: engine.submit(second))
    while driver.num_ended == 0:
        driver.advance(lambda engine: engine.request_yield("unknown"))
        driver.advance()
    assert len(driver.answers[1]) == 30
    driver.stepper.stop()


def test_failing_sequence_does_not_affect_others(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = StepperDriver(engine)
    first, second, *_ = sequences()
    for new in (first, second):
        driver.advance(lambda engine, new=new: engine.submit(new))  # type: ignore[misc]
    while len(driver.answers.get(1, [])) < 3:
        driver.advance()
    row = engine.batcher.table.keys.tolist().index(0)
    run = engine.executor.runner.run

    def run_with_nan(plan, drawn=None, **options):  # type: ignore[no-untyped-def]
        logits = run(plan, drawn, **options).clone()
        logits[plan.rows[plan.samples] == row] = torch.nan
        return logits

    monkeypatch.setattr(engine.executor.runner, "run", run_with_nan)
    while driver.num_ended < 2:
        driver.advance()
    assert driver.failed == [0]
    assert len(driver.answers[1]) == 30
    driver.stepper.stop()
    engine.batcher.check()


def test_exception_of_the_model_is_raised_on_the_engines_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(plan: object, drawn: object = None, beside: object = None) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine.executor.runner, "run", broken)
    driver = StepperDriver(engine)

    def submit_and_wait() -> None:
        driver.advance(lambda engine: engine.submit(sequences()[0]))
        driver.advance()

    with pytest.raises(RuntimeError, match="out of memory"):
        submit_and_wait()
    driver.stepper.stop()


def test_steps_are_planned_ahead_unless_sampling_reads_the_answer(checkpoint: Path) -> None:
    """A penalty depends on the previous tokens, so a step with penalties is not planned ahead."""
    plain, *_, with_penalty, _ = sequences()
    for new, ahead in ((plain, True), (with_penalty, False)):
        engine = make_engine(checkpoint)
        engine.plans_ahead = engine.executor.on_device = True
        driver = StepperDriver(engine)
        driver.advance(lambda engine, new=new: engine.submit(new))  # type: ignore[misc]
        while driver.num_ended == 0:
            driver.advance()
        assert driver.num_ahead > 20 if ahead else driver.num_ahead == 0
        driver.stepper.stop()
