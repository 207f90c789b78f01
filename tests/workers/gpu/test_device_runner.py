"""DeviceRunner on the CPU, where replaying a graph calls the captured function again."""

from pathlib import Path

import pytest
import torch

from penstock.workers.engine.model_runner import ModelRunner
from penstock.workers.gpu import device_runner
from penstock.workers.gpu.device_runner import DeviceRunner, waits_for_device
from penstock.workers.gpu.graph_buckets import GraphBuckets
from penstock.workers.models.decoder import Decoder
from penstock.workers.weights.loading import load_model
from tests.support.checkpoints import make_checkpoint
from tests.support.planner import BLOCK_SIZE, Planner, make_cache
from tests.support.simulated_device import Replays, plan_on_host

PROMPTS = [[9, 8, 7], list(range(40)), [5]]
NUM_STEPS = 6


@pytest.fixture(autouse=True)
def _plans_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_on_host(monkeypatch)


@pytest.fixture(scope="module", params=["qwen2-window", "deepseek-v3"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, request.param)
    return load_model(folder, "auto", torch.device("cpu"))[1]


def make_runner(decoder: Decoder, planner: Planner) -> tuple[DeviceRunner, Replays]:
    cache = make_cache(decoder, planner.num_blocks + 1)
    cache.data[:, :, :-1] = torch.nan  # as if an earlier sequence with NaN had used these blocks
    runner, replays = DeviceRunner(decoder, cache, GraphBuckets(8, 64)), Replays()
    runner.capture(replays)
    return runner, replays


def test_captured_decodes_equal_uncaptured_ones(decoder: Decoder) -> None:
    plain, captured = (Planner(PROMPTS, NUM_STEPS + 1) for _ in range(2))
    one = ModelRunner(decoder, make_cache(decoder, plain.num_blocks))
    other, replays = make_runner(decoder, captured)
    assert replays.captured == len(GraphBuckets(8, 64).buckets())
    for step in range(NUM_STEPS):
        chunk = 1000 if step == 0 else 1
        expected, found = one.run(plain.plan(chunk)), other.run(captured.plan(chunk))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        tokens = expected.argmax(-1).tolist()
        plain.commit(plain.plan(chunk), tokens)
        captured.commit(captured.plan(chunk), tokens)
    assert replays.replayed == NUM_STEPS - 1


def test_tokens_already_on_the_device_are_used(decoder: Decoder) -> None:
    planner = Planner(PROMPTS, 2)
    runner, replays = make_runner(decoder, planner)
    planner.commit(planner.plan(1000), runner.run(planner.plan(1000)).argmax(-1).tolist())
    plan = planner.plan(1)
    expected = runner.run(plan).clone()
    drawn = torch.from_numpy(plan.tokens.copy())
    plan.tokens[:] = 0
    torch.testing.assert_close(runner.run(plan, drawn), expected)
    assert replays.replayed == 2


def test_captured_step_writes_only_its_slots_and_the_scratch_block(decoder: Decoder) -> None:
    planner = Planner(PROMPTS, 1)
    runner, replays = make_runner(decoder, planner)
    runner.run(planner.plan(1000))
    before = runner.cache.data.clone()
    planner.computed = [len(prompt) - 1 for prompt in PROMPTS]
    plan = planner.plan(1)
    runner.cache.data[:] = 5.0
    runner.cache.data[:, :, -1] = before[:, :, -1]
    runner.run(plan)
    assert replays.replayed == 1
    written = torch.zeros(planner.num_blocks, BLOCK_SIZE, dtype=torch.bool)
    written.view(-1)[torch.from_numpy(plan.slots).long()] = True
    touched = (runner.cache.data[:, :, :-1] != 5.0).any(-1)
    assert torch.equal(touched, written[None, None, :, None].expand_as(touched))
    assert runner.cache.data[:, :, -1].isfinite().all()


def test_mixture_that_chooses_experts_on_the_host_runs_uncaptured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_runner, "waits_for_device", waits_for_device)
    make_checkpoint(tmp_path, "qwen3-moe")
    mixture = load_model(tmp_path, "auto", torch.device("cpu"))[1]
    planner = Planner(PROMPTS, 2)
    runner, replays = make_runner(mixture, planner)
    expected = ModelRunner(mixture, make_cache(mixture, planner.num_blocks))
    for chunk in (1000, 1):
        plan = planner.plan(chunk)
        found = runner.run(plan)
        torch.testing.assert_close(found, expected.run(plan), rtol=1e-4, atol=1e-4)
        planner.commit(plan, found.argmax(-1).tolist())
    assert (replays.captured, replays.replayed) == (0, 0)
