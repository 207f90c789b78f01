"""Tests of the engine on a GPU, run only by `make gpu`. They have not run on a GPU yet."""

import itertools
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.common.sampling_params import SamplingParams
from penstock.kernels.attention.backends import choice
from penstock.kernels.attention.backends.choice import try_backend
from penstock.kernels.attention.backends.interface import AttentionRequest
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine, make_stepper
from penstock.workers.engine.stepper import DeviceStepper
from penstock.workers.gpu.cuda_graphs import CudaCaptures
from penstock.workers.gpu.device_runner import DeviceRunner
from penstock.workers.gpu.graph_buckets import GraphBuckets
from penstock.workers.gpu.pinned import AsyncTokenCopy, put
from penstock.workers.models.decoder import Decoder
from penstock.workers.scheduling.sequence import NewSequence
from penstock.workers.weights.loading import load_model
from tests.support.engines import run_out, tokens_of
from tests.support.planner import Planner, make_cache
from tests.support.tiny import VOCAB_SIZE, tiny_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [[9, 8, 7], list(range(40)), [5]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def decoder(checkpoint: Path) -> Decoder:
    return load_model(checkpoint, "float32", torch.device("cuda"))[1]


def test_captured_decodes_equal_uncaptured_ones(decoder: Decoder) -> None:
    planner = Planner(PROMPTS, 5)
    runners = [
        DeviceRunner(decoder, make_cache(decoder, planner.num_blocks + 1), GraphBuckets(8, 64))
        for _ in range(2)
    ]
    runners[1].capture(CudaCaptures(decoder.device))
    for step in range(4):
        plan = planner.plan(1000 if step == 0 else 1)
        expected, found = (runner.run(plan) for runner in runners)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        planner.commit(plan, expected.argmax(-1).tolist())


def make_engine(checkpoint: Path) -> Engine:
    return Engine(
        WorkerConfig(
            "w",
            checkpoint,
            device="cuda",
            dtype="float32",
            kv_cache_mib=8,
            max_sequences=8,
            max_batched_tokens=32,
        )
    )


def sequences() -> list[NewSequence]:
    kinds = (SamplingParams(temperature=0.0, max_tokens=40), SamplingParams(seed=5, max_tokens=30))
    return [
        NewSequence(number, list(range(3, 20 + 9 * number)), 17 + 9 * number, params)
        for number, params in enumerate(kinds)
    ]


def test_steps_planned_ahead_give_the_same_tokens(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    for new in sequences():
        engine.submit(new)
    expected = run_out(engine)
    engine = make_engine(checkpoint)
    engine.warm_up()
    changed = threading.Condition()
    stepper = make_stepper(engine, changed)
    assert isinstance(stepper, DeviceStepper)
    for new in sequences():
        engine.submit(new)
    answers: dict[object, list[int]] = {}
    for iteration in itertools.count():
        result = stepper.advance(commanded=iteration == 0)
        for key, token in tokens_of(result):
            answers.setdefault(key, []).append(token)
        if not stepper.busy:
            break
        stepper.plan_next()
        with changed:
            assert changed.wait_for(lambda: stepper.due, 60)
    stepper.stop()
    assert answers == expected


def test_tokens_are_copied_back_while_the_stream_computes() -> None:
    copying = torch.cuda.Stream()
    work = torch.randn(2048, 2048, device="cuda")
    found = []
    for number in range(20):
        tokens = put(torch.full((64,), number, dtype=torch.int32).numpy(), work.device)
        finite = torch.arange(64, device="cuda") != number
        found.append(AsyncTokenCopy(tokens, finite, copying))
        work = work @ work / 50
    for number, readback in enumerate(found):
        tokens_back, finite_back = readback.wait()
        expected = [0 if row == number else number for row in range(64)]
        assert tokens_back.tolist() == expected
        assert finite_back.sum() == 63


def test_cache_takes_the_remaining_memory(checkpoint: Path) -> None:
    config = WorkerConfig("w", checkpoint, device="cuda", max_sequences=4, max_batched_tokens=32)
    engine = Engine(config)
    free, total = torch.cuda.mem_get_info()
    assert engine.cache.data.nbytes > total // 3
    assert free > 0
    engine.warm_up()
    assert engine.spec.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize("name", choice.EXTERNAL)
def test_installed_attention_backend_agrees_with_the_reference(name: str) -> None:
    """Try a backend as at a worker's start, for heads like those of Llama and of Gemma 2."""
    external = choice.EXTERNAL[name]
    pytest.importorskip(external.module)
    device = torch.device("cuda")
    llama = AttentionRequest(
        device="cuda",
        capability=torch.cuda.get_device_capability(),
        multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count,
        dtype="bfloat16",
        cached="bfloat16",
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        block_size=64,
        captured_rows=256,
        windows=(0,),
        scale=None,
    )
    gemma = replace(llama, num_heads=8, num_kv_heads=4, head_dim=256, windows=(0, 40), cap=50.0)
    for request in (llama, gemma):
        if reason := external.supports(request):
            pytest.skip(reason)
        try_backend(external.create(request, device), request, device)
