"""ModelRunner: logits of the sampling rows only, and writes to the step's own KV slots only."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.workers.engine.model_runner import ModelRunner
from penstock.workers.models.decoder import Decoder
from penstock.workers.weights.loading import load_model
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.planner import BLOCK_SIZE, Planner, make_cache

PROMPTS = [[9, 8, 7], list(range(40)), [5]]


@pytest.fixture(scope="module", params=["qwen2-window", "deepseek-v3"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, request.param)
    return load_model(folder, "auto", torch.device("cpu"))[1]


def test_only_rows_that_sample_have_logits(decoder: Decoder) -> None:
    planner = Planner(PROMPTS, max_new=1)
    runner = ModelRunner(decoder, make_cache(decoder, planner.num_blocks))
    plan = planner.plan(chunk=1000)
    every = runner.run(plan)
    assert every.shape == (3, VOCAB_SIZE)
    assert every.dtype == torch.float32
    some = runner.run(replace(plan, samples=np.array([False, True, True])))
    torch.testing.assert_close(some, every[1:], rtol=1e-5, atol=1e-5)
    none = runner.run(replace(plan, samples=np.zeros(3, np.bool_)))
    assert none.shape == (0, VOCAB_SIZE)


def test_step_writes_only_its_own_slots(decoder: Decoder) -> None:
    planner = Planner(PROMPTS, max_new=1)
    cache = make_cache(decoder, planner.num_blocks)
    cache.data.fill_(5.0)
    plan = planner.plan(chunk=1000)
    ModelRunner(decoder, cache).run(plan)
    written = torch.zeros(planner.num_blocks, BLOCK_SIZE, dtype=torch.bool)
    written.view(-1)[torch.from_numpy(plan.slots).long()] = True
    touched = (cache.data != 5.0).any(-1)  # shape [layers, sides, blocks, heads, slots]
    assert torch.equal(touched, written[None, None, :, None].expand_as(touched))


def test_sequence_continues_from_copied_blocks(decoder: Decoder) -> None:
    """Copying a sequence's blocks to other blocks of another cache leaves the logits unchanged."""
    planner = Planner(PROMPTS, max_new=2)
    cache = make_cache(decoder, planner.num_blocks)
    runner = ModelRunner(decoder, cache)
    plan = planner.plan(chunk=1000)
    planner.commit(plan, runner.run(plan).argmax(-1).tolist())
    moved = make_cache(decoder, planner.num_blocks)
    order = torch.from_numpy(np.random.default_rng(1).permutation(planner.num_blocks))
    moved.data[:, :, order] = cache.data
    continued = Planner(PROMPTS, max_new=2)
    continued.tokens, continued.computed = planner.tokens, planner.computed
    continued.tables = order.numpy()[planner.tables].astype(np.int32)
    found = ModelRunner(decoder, moved).run(continued.plan(chunk=1))
    torch.testing.assert_close(found, runner.run(planner.plan(chunk=1)), rtol=1e-5, atol=1e-5)


def test_sequence_with_nan_does_not_affect_others(decoder: Decoder) -> None:
    planner = Planner(PROMPTS, max_new=2)
    cache = make_cache(decoder, planner.num_blocks)
    runner = ModelRunner(decoder, cache)
    plan = planner.plan(chunk=1000)
    planner.commit(plan, runner.run(plan).argmax(-1).tolist())
    plan = planner.plan(chunk=1)
    expected = runner.run(plan)
    cache.data[:, :, planner.tables[1]] = torch.nan
    found = runner.run(plan)
    assert found[1].isnan().all()
    torch.testing.assert_close(found[[0, 2]], expected[[0, 2]], rtol=1e-5, atol=1e-5)
