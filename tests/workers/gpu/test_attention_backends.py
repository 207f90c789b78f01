"""Engines and runners with attention backends of other libraries, replaced by stand-ins."""

from __future__ import annotations

import logging
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from penstock.kernels.attention.backends import choice
from penstock.kernels.attention.backends.interface import AttentionRequest
from penstock.kernels.kv_cache.format import FORMATS
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.model_runner import ModelRunner
from penstock.workers.gpu.attention_request import attention_request
from penstock.workers.gpu.device_runner import DeviceRunner
from penstock.workers.gpu.graph_buckets import GraphBuckets
from penstock.workers.models.decoder import Decoder
from penstock.workers.rank import rank_runtime
from penstock.workers.weights.loading import load_model
from tests.support.attention_modules import fake_modules
from tests.support.checkpoints import make_checkpoint
from tests.support.planner import BLOCK_SIZE, Planner, make_cache
from tests.support.ranks import agree, answer, in_threads, make_model, rank_config
from tests.support.simulated_device import Replays, plan_on_host, simulate_device

if TYPE_CHECKING:
    from penstock.workers.parallel.rendezvous import LocalStore

CPU = torch.device("cpu")
PROMPTS = [[9, 8, 7], list(range(40)), [5]]
NUM_STEPS = 5


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in fake_modules().items():
        monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder: Path = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, "qwen2-window")  # a model whose layers have two different windows
    return load_model(folder, "auto", CPU)[1]


@pytest.mark.parametrize("name", choice.EXTERNAL)
def test_captured_and_uncaptured_steps_equal_those_of_ours(
    name: str, decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_on_host(monkeypatch)
    request = attention_request(decoder, decoder.dtype, BLOCK_SIZE, 8, False)
    assert len(set(request.windows)) == 2
    backend = choice.EXTERNAL[name].create(request, CPU)
    plain, captured = (Planner(PROMPTS, NUM_STEPS + 1) for _ in range(2))
    ours = ModelRunner(decoder, make_cache(decoder, plain.num_blocks))
    cache, replays = make_cache(decoder, captured.num_blocks + 1), Replays()
    runner = DeviceRunner(decoder, cache, GraphBuckets(8, 64), attention=backend)
    runner.capture(replays)
    for step in range(NUM_STEPS):
        chunk = 17 if step < 3 else 1
        expected, found = ours.run(plain.plan(chunk)), runner.run(captured.plan(chunk))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        tokens = expected.argmax(-1).tolist()
        plain.commit(plain.plan(chunk), tokens)
        captured.commit(captured.plan(chunk), tokens)
    assert 0 < replays.replayed < NUM_STEPS


def on_hopper(request: AttentionRequest) -> AttentionRequest:
    dtype = "bfloat16"
    return replace(request, device="cuda", capability=(9, 0), dtype=dtype, cached=dtype)


def test_option_of_a_worker_chooses_the_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(tmp_path, "llama")
    caplog.set_level(logging.INFO)
    expected = answer(Engine(rank_config(model)))
    assert "attention backend: cpu" in caplog.messages
    captures = simulate_device(monkeypatch)
    monkeypatch.setattr(
        rank_runtime,
        "attention_request",
        lambda *arguments: on_hopper(attention_request(*arguments)),
    )
    engine = Engine(rank_config(model, attention_backend="fa3"))
    assert caplog.messages[-1] == "attention backend: fa3"
    engine.warm_up()
    agree(answer(engine), expected)
    assert captures[0].replayed > 5


def test_ranks_use_a_backend_only_if_all_of_them_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(tmp_path, "llama")
    decoders = [load_model(model, "auto", CPU)[1] for _ in range(2)]
    monkeypatch.setattr(rank_runtime, "_runs_asynchronously", lambda decoder: True)

    def chosen(*are_supported: bool) -> list[str]:
        def request(decoder: Decoder, *sizes: Any) -> AttentionRequest:
            found = on_hopper(attention_request(decoder, *sizes))
            return replace(found, has_sinks=not are_supported[decoder is decoders[1]])

        def choose(rank: int, store: LocalStore) -> str:
            config = rank_config(model, (2, 1, 2), rank=rank, attention_backend="fa3")
            form = FORMATS["bfloat16"]
            found = rank_runtime._choose_attention(config, decoders[rank], form, store)
            assert found is not None
            return found.name

        monkeypatch.setattr(rank_runtime, "attention_request", request)
        return in_threads(2, choose)

    assert chosen(True, True) == ["fa3", "fa3"]
    assert chosen(True, False) == ["triton", "triton"]
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    prefix = "attention backend fa3 is not used: "
    assert sorted(warnings) == [
        prefix + "another rank of this worker cannot use it; using triton",
        prefix + "it does not support attention sinks; using triton",
    ]


def test_worker_on_a_cpu_uses_ours_and_logs_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Engine(rank_config(make_model(tmp_path, "llama"), attention_backend="flashinfer"))
    message = "attention backend flashinfer is not used: it needs a CUDA device; using cpu"
    assert message in caplog.messages


@pytest.mark.parametrize(
    ("name", "reason"),
    [("gpt-oss", "attention sinks"), ("bloom", "ALiBi"), ("deepseek", "latent attention")],
)
def test_request_describes_the_model(tmp_path: Path, name: str, reason: str) -> None:
    decoder = load_model(make_model(tmp_path, name), "auto", CPU)[1]
    request = on_hopper(attention_request(decoder, torch.bfloat16, 16, 300, False))
    assert reason in choice.EXTERNAL["flashinfer"].supports(request)
    assert request.captured_rows == 256
    assert not request.deterministic
    assert "deterministic" in choice.EXTERNAL["fa3"].supports(replace(request, deterministic=True))
