"""Pipeline: steps planned ahead give the same tokens, whatever comes between them."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.common.sampling_params import SamplingParams
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine, StepResult
from penstock.workers.engine.stepper import OverlapStepper, make_stepper
from penstock.workers.scheduling.sequence import Key, NewSequence
from tests.support.engines import run_out
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


class Driven:
    """A pipeline turned by hand, and what it has given."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.changed = threading.Condition()
        pipeline = make_stepper(engine, self.changed)
        assert isinstance(pipeline, OverlapStepper)
        self.pipeline = pipeline
        self.answers: dict[Key, list[int]] = {}
        self.failed: list[Key] = []
        self.num_ended = 0
        self.num_ahead = 0

    def turn(self, command: Callable[[Engine], object] | None = None) -> StepResult:
        """What the engine's thread does once, after a command or a step's end."""
        if command is None:
            with self.changed:
                assert self.changed.wait_for(lambda: self.pipeline.due, timeout=60)
        else:
            command(self.engine)
        result = self.pipeline.advance(command is not None)
        if result.output is not None:
            columns = zip(
                result.output.keys, result.output.tokens.tolist(), result.logprobs, strict=True
            )
            for key, token, _ in columns:
                self.answers.setdefault(key, []).append(token)
        self.failed += result.failed
        self.num_ended += len(result.finished) + len(result.failed)
        self.pipeline.plan_next()
        self.num_ahead += len(self.engine.batcher._in_flight.plans) == 2
        return result


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def make_engine(checkpoint: Path) -> Engine:
    return Engine(
        WorkerConfig("w", checkpoint, kv_cache_mib=1, max_sequences=8, max_batched_tokens=32)
    )


@pytest.fixture(params=["a thread computes", "a device computes"])
def engine(checkpoint: Path, request: pytest.FixtureRequest) -> Engine:
    """In the second form the CPU stands in for a device: steps are launched, tokens read back."""
    engine = make_engine(checkpoint)
    engine.plans_ahead = True
    engine.on_device = request.param == "a device computes"
    return engine


def test_answers_are_those_of_steps_one_by_one(engine: Engine, checkpoint: Path) -> None:
    one_by_one = make_engine(checkpoint)
    for new in sequences():
        one_by_one.submit(new)
    expected = run_out(one_by_one)
    driven = Driven(engine)
    for new in sequences():
        driven.turn(lambda engine, new=new: engine.submit(new))  # type: ignore[misc]
    while driven.num_ended < len(PROMPTS):
        driven.turn()
    assert driven.answers == expected
    assert driven.num_ahead > 5
    driven.pipeline.stop()
    engine.batcher.check()


def test_command_takes_back_the_step_behind(engine: Engine) -> None:
    driven = Driven(engine)
    first, second, *_ = sequences()
    driven.turn(lambda engine: engine.submit(first))
    for _ in range(5):
        driven.turn()
    driven.turn(lambda engine: engine.submit(second))
    while driven.num_ended == 0:
        driven.turn(lambda engine: engine.request_yield("nobody"))
        driven.turn()
    assert len(driven.answers[1]) == 30
    driven.pipeline.stop()


def test_failure_of_one_ends_it_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    driven = Driven(engine)
    first, second, *_ = sequences()
    for new in (first, second):
        driven.turn(lambda engine, new=new: engine.submit(new))  # type: ignore[misc]
    while len(driven.answers.get(1, [])) < 3:
        driven.turn()
    row = engine.batcher.table.keys.tolist().index(0)
    run = engine._runner.run

    def spoilt(plan, drawn=None):  # type: ignore[no-untyped-def]
        logits = run(plan, drawn).clone()
        logits[plan.rows[plan.samples] == row] = torch.nan
        return logits

    monkeypatch.setattr(engine._runner, "run", spoilt)
    while driven.num_ended < 2:
        driven.turn()
    assert driven.failed == [0]
    assert len(driven.answers[1]) == 30
    driven.pipeline.stop()
    engine.batcher.check()


def test_exception_of_the_model_is_raised_on_the_engines_thread(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(plan: object, drawn: object = None) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._runner, "run", broken)
    driven = Driven(engine)

    def submit_and_wait() -> None:
        driven.turn(lambda engine: engine.submit(sequences()[0]))
        driven.turn()

    with pytest.raises(RuntimeError, match="out of memory"):
        submit_and_wait()
    driven.pipeline.stop()


def test_tokens_stay_on_the_device_until_a_draw_needs_the_answer(checkpoint: Path) -> None:
    """Plain sequences are planned ahead all the way; one with a penalty wants its answer first."""
    plain, *_, penalised, _ = sequences()
    for new, ahead in ((plain, True), (penalised, False)):
        engine = make_engine(checkpoint)
        engine.plans_ahead = engine.on_device = True
        driven = Driven(engine)
        driven.turn(lambda engine, new=new: engine.submit(new))  # type: ignore[misc]
        while driven.num_ended == 0:
            driven.turn()
        assert driven.num_ahead > 20 if ahead else driven.num_ahead == 0
        driven.pipeline.stop()
