"""The decoder compared with transformers: equal tokens, and equal logits within rounding."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.workers.models.decoder import Decoder
from penstock.workers.weights.loading import load_model
from tests.support.answers import Expected, check, expected_answers
from tests.support.checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint
from tests.support.planner import generate

pytestmark = pytest.mark.slow

MAX_NEW = 20  # answers cross a block boundary and every family's window
# A block has 16 positions. Some prompts are shorter, some are equally long, and some longer.
LENGTHS = (1, 5, 16, 33, 16, 15, 70)
MIN_LENGTH = {"phi3-long": 4}  # for shorter prompts, transformers uses the short RoPE factors

Model = tuple[Decoder, list[list[int]], Expected]


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp(request.param)
    reference = make_checkpoint(folder, request.param)
    _, decoder = load_model(folder, "auto", torch.device("cpu"))
    prompts = make_prompts(MIN_LENGTH.get(request.param, 1))
    return decoder, prompts, expected_answers(reference, prompts, MAX_NEW)


@cache
def make_prompts(min_length: int) -> list[list[int]]:
    numbers = np.random.default_rng(5)
    return [numbers.integers(4, VOCAB_SIZE, max(length, min_length)).tolist() for length in LENGTHS]


def test_expected_answers_contain_many_different_tokens(model: Model) -> None:
    assert len({token for answer in model[2][0] for token in answer}) > 20


@pytest.mark.parametrize("index", [LENGTHS.index(length) for length in (1, 16, 33, 70)])
def test_single_prompt_matches_transformers(model: Model, index: int) -> None:
    decoder, prompts, (answers, logits) = model
    found = generate(decoder, [prompts[index]], MAX_NEW)
    check(found, ([answers[index]], [logits[index]]))


@pytest.mark.parametrize("chunk", [1, 3, 16, 23, 100])
def test_batched_chunked_prompts_match_transformers(model: Model, chunk: int) -> None:
    decoder, prompts, expected = model
    check(generate(decoder, prompts, MAX_NEW, chunk), expected)
