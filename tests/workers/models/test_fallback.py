"""Models that transformers computes over our cache: the same answers as its own `generate`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.workers.config import WorkerConfig
from penstock.workers.engine import Engine
from penstock.workers.models.fallback import FallbackModel, load_fallback
from penstock.workers.models.served import ServedModel
from penstock.workers.models.spec import read_config
from penstock.workers.weights.loading import load
from tests.support.answers import Expected, check, expected_answers
from tests.support.checkpoints import OTHERS, VOCAB_SIZE, make_checkpoint
from tests.support.engines import greedy_sequence, run_out
from tests.support.planner import generate

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
MAX_NEW = 8
LENGTHS = (12, 16, 61)  # answers that cross a block and a window
OURS = ("gemma2", "gpt-oss")  # whose soft caps, windows and sinks pass through the interface too

Model = tuple[ServedModel, list[list[int]], Expected]


@pytest.fixture(scope="module", params=[*OTHERS, *OURS])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp(request.param)
    reference = make_checkpoint(folder, request.param)
    if request.param in OURS:
        _, found = load_fallback(
            read_config(folder), (), torch.float32, CPU, None, 0, lambda done, total: None
        )
    else:
        _, found = load(folder, "auto", CPU)  # type: ignore[assignment]
    assert isinstance(found, FallbackModel)
    numbers = np.random.default_rng(5)
    prompts = [numbers.integers(4, VOCAB_SIZE, length).tolist() for length in LENGTHS]
    return found, prompts, expected_answers(reference, prompts, MAX_NEW)


def test_alone(model: Model) -> None:
    computed, prompts, (answers, logits) = model
    for prompt, answer, rows in zip(prompts, answers, logits, strict=True):
        check(generate(computed, [prompt], MAX_NEW), ([answer], [rows]))


def test_in_a_crowd_and_in_chunks(model: Model) -> None:
    computed, prompts, expected = model
    check(generate(computed, prompts, MAX_NEW, chunk=21), expected)


def test_the_engine_serves_it(tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, "gpt-bigcode")
    sizes: dict[str, Any] = {"kv_cache_mib": 1, "max_sequences": 8, "max_batched_tokens": 32}
    engine = Engine(WorkerConfig("w", tmp_path, **sizes))
    engine.warm_up()
    prompts = [list(range(4, 4 + length)) for length in (5, 50)]
    expected, _ = expected_answers(reference, prompts, MAX_NEW)
    for number, prompt in enumerate(prompts):
        engine.submit(greedy_sequence(number, prompt, MAX_NEW))
    assert run_out(engine) == dict(enumerate(expected))
    engine.batcher.check()
