"""Natively supported models, run through the transformers backend on the paged KV cache.

Soft caps, sliding windows and sinks must pass through the backend's attention interface.
`test_architectures` tests the models that only this backend supports.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.workers.models.protocols import Model
from penstock.workers.models.spec import read_config
from penstock.workers.models.transformers_backend.loading import load_transformers_model
from tests.support.answers import Expected, check, expected_answers
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.planner import generate

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
MAX_NEW = 8
# With each of these lengths, a prompt and its answer cross a block or window boundary.
LENGTHS = (12, 16, 61)

LoadedModel = tuple[Model, list[list[int]], Expected]


@pytest.fixture(scope="module", params=["gemma2", "gpt-oss"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp(request.param)
    reference = make_checkpoint(folder, request.param)
    config = read_config(folder)
    _, found = load_transformers_model(
        config, (), torch.float32, CPU, None, 0, lambda done, total: None
    )
    numbers = np.random.default_rng(5)
    prompts = [numbers.integers(4, VOCAB_SIZE, length).tolist() for length in LENGTHS]
    return found, prompts, expected_answers(reference, prompts, MAX_NEW)


def test_single_prompts_match_transformers(model: LoadedModel) -> None:
    computed, prompts, (answers, logits) = model
    for prompt, answer, rows in zip(prompts, answers, logits, strict=True):
        check(generate(computed, [prompt], MAX_NEW), ([answer], [rows]))


def test_batched_chunked_prompts_match_transformers(model: LoadedModel) -> None:
    computed, prompts, expected = model
    check(generate(computed, prompts, MAX_NEW, chunk=21), expected)
