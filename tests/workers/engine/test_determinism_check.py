"""Deterministic mode: results are bitwise identical for any batch, chunks, cache or preemption."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.common.sampling_params import SamplingParams
from penstock.kernels.cpu_common.cpu_features import has_amx
from penstock.kernels.kv_cache.format import FORMATS
from penstock.kernels.linear import cpu_packed_f32
from penstock.kernels.linear.cpu_packed_int8 import has_int8_loops
from penstock.kernels.linear.op import PackedLinear
from penstock.workers.config import WorkerConfig
from penstock.workers.engine import model_runner
from penstock.workers.engine.determinism_check import check_batch_invariance
from penstock.workers.engine.engine import Engine
from penstock.workers.layers import packing
from penstock.workers.models.config import UnsupportedModel
from penstock.workers.parallel.mesh import Mesh
from penstock.workers.rank import fingerprint
from penstock.workers.rank.fingerprint import layout_of, numerics_of
from penstock.workers.service.grpc_service import serve_worker
from tests.support.attached_router import AttachedRouter, greedy
from tests.support.checkpoints import make_checkpoint
from tests.support.disaggregated_pair import DisaggregatedPair
from tests.support.engines import run_greedy
from tests.support.schedule_player import Bits, Request, Schedule, play
from tests.support.step_graph_checkpoints import COMPATIBLE_SIZES, make_compatible
from tests.support.tiny import tiny_checkpoint

FAMILIES = ("llama3", "mistral", "gemma2", "qwen2-moe", "gpt-oss", "bloom-untied", "falcon-rw",
            "deepseek-v2", "deepseek-v3")  # fmt: skip
BLOCK_SIZE = 4
ENGINE = {"kv_cache_mib": 2, "max_sequences": 8, "max_batched_tokens": 64, "block_size": BLOCK_SIZE}


def make_engine(folder: Path, **other: Any) -> Engine:
    return Engine(WorkerConfig("w", folder, deterministic=True, **{**ENGINE, **other}))


def make_requests(vocab_size: int) -> list[Request]:
    """Return greedy and sampled requests, with logprobs; some share a prefix."""
    tokens = np.random.default_rng(3).integers(4, vocab_size, 90).tolist()
    greedy = SamplingParams(temperature=0.0, max_tokens=12, logprobs=3)
    drawn = replace(greedy, temperature=0.8, top_p=0.9, seed=5, repetition_penalty=1.1)
    return [
        Request(tokens[:70], greedy),
        Request(tokens[:33], replace(drawn, max_tokens=17, typical_p=0.95)),
        Request(tokens[:33], replace(drawn, logprobs=1), num_choices=3),
        Request(tokens[40:41], replace(greedy, max_tokens=21)),
        Request(tokens[50:71], replace(drawn, min_p=0.02, prompt_logprobs=2)),
    ]


REQUESTS = make_requests(150)
NO_SHARING = Schedule(shared=False)


def run_separately(engine: Engine, requests: Sequence[Request]) -> list[Bits]:
    """Run each request alone, with its prompt in at most two chunks."""
    return [play(engine, [request], NO_SHARING) for request in requests]


def merge(results: list[Bits]) -> Bits:
    """Merge the results of separate runs; the requests are numbered in the order of the runs."""
    return {
        (number, choice): entries
        for number, bits in enumerate(results)
        for (_, choice), entries in bits.items()
    }


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    count = len(REQUESTS)
    return Schedule(
        max_batched_tokens=draw(st.sampled_from([8, 11, 23, 64])),
        num_blocks=draw(st.sampled_from([None, 24, 30, 50])),
        arrivals=tuple(draw(st.lists(st.integers(0, 25), min_size=count, max_size=count))),
        moved=draw(st.dictionaries(st.integers(0, count - 1), st.integers(1, 20), max_size=3)),
        shared=draw(st.booleans()),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return make_engine(folder)


@pytest.fixture(scope="module")
def expected(engine: Engine) -> Bits:
    return merge(run_separately(engine, REQUESTS))


@settings(max_examples=4, deadline=None)
@given(schedule=schedules())
def test_bits_are_equal_in_any_schedule(engine: Engine, expected: Bits, schedule: Schedule) -> None:
    assert play(engine, REQUESTS, schedule) == expected


def test_bits_are_equal_after_preemption(engine: Engine, expected: Bits) -> None:
    found = play(engine, REQUESTS, Schedule(num_blocks=24))
    assert engine.load().preemptions > 0
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("threads", [2, 3])
def test_bits_are_equal_with_more_threads(engine: Engine, expected: Bits, threads: int) -> None:
    assert play(engine, REQUESTS, Schedule(max_batched_tokens=23, threads=threads)) == expected


def test_bits_are_equal_with_cached_prompts(engine: Engine, expected: Bits) -> None:
    late = tuple(range(0, 60 * len(REQUESTS), 60))
    found = play(engine, REQUESTS, Schedule(arrivals=late))
    assert engine.load().prompt_tokens_cached > 0
    assert found == expected


def test_bits_are_equal_in_an_engine_with_another_history(
    folder: Path, engine: Engine, expected: Bits
) -> None:
    """Other requests have filled this engine's tables and cache; the cache also holds NaN."""
    other = make_engine(folder)
    torch.nn.init.constant_(other.cache.data, torch.nan)
    run_greedy(other, [5] * 200, 30)
    assert play(other, REQUESTS, Schedule(max_batched_tokens=9)) == expected


@dataclass
class BatchDependentLinear:
    """A linear layer whose rounding depends on the number of rows."""

    linear: PackedLinear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y * (1 + 2**-22) if len(x) % 2 else y


def make_batch_dependent(engine: Engine) -> None:
    decoder: Any = engine.executor.runner.decoder
    for linear in (decoder.layers[1].mlp.down, decoder.head):
        assert linear.weight.numel() == 0
        linear.packed = BatchDependentLinear(linear.packed)


def test_batch_dependent_linear_layer_is_detected(folder: Path) -> None:
    engine = make_engine(folder)
    make_batch_dependent(engine)
    expected = merge(run_separately(engine, REQUESTS[1:2]))
    assert play(engine, REQUESTS[1:2], Schedule(max_batched_tokens=8)) != expected
    with pytest.raises(ValueError, match="deterministic mode is not available on this"):
        check_batch_invariance(engine)


@pytest.mark.parametrize("sizes", [{}, {"max_sequences": 1}, {"max_model_len": 4}])
def test_check_and_warm_up_leave_no_work_and_no_counts(folder: Path, sizes: dict[str, int]) -> None:
    engine = make_engine(folder, **sizes)
    check_batch_invariance(engine)
    # The check has restored the limits, so the warm-up can compute its prompt in one step.
    assert engine.batcher.limits == engine.limits
    engine.warm_up()
    assert engine.step().empty
    load = engine.load()
    assert (load.num_steps, load.prompt_tokens_computed) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_of_each_model_family_are_equal_in_any_schedule(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    engine = make_engine(tmp_path)
    check_batch_invariance(engine)
    expected = merge(run_separately(engine, REQUESTS))
    answers = [entries for (_, choice), entries in expected.items() if choice >= 0]
    assert len({token for entries in answers for token, _ in entries}) > 20

    @settings(max_examples=8, deadline=None)
    @given(schedule=schedules())
    def check(schedule: Schedule) -> None:
        assert play(engine, REQUESTS, schedule) == expected

    check()


GRAPH_CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**COMPATIBLE_SIZES),
    "int8": transformers.LlamaConfig(**COMPATIBLE_SIZES | {"intermediate_size": 128}),
    "gemma2": transformers.Gemma2Config(
        **COMPATIBLE_SIZES, sliding_window=13, query_pre_attn_scalar=24
    ),
    "qwen3": transformers.Qwen3Config(**COMPATIBLE_SIZES),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAPH_CONFIGS)
def test_cpu_step_graph_has_the_bits_of_separate_operations(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of a CPU step graph are bitwise identical to those of separate operations."""
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(cpu_packed_f32, "has_avx2", lambda: True)
    make_compatible(tmp_path, GRAPH_CONFIGS[name])
    quantization = "int8" if name == "int8" and has_int8_loops() else "none"
    engine = make_engine(tmp_path, quantization=quantization)
    assert engine.executor.runner._step_graph is not None
    check_batch_invariance(engine)
    expected = merge(run_separately(engine, REQUESTS))
    monkeypatch.setattr(model_runner, "build_cpu_step_graph", lambda *_: None)
    without_graph = make_engine(tmp_path, quantization=quantization)
    assert merge(run_separately(without_graph, REQUESTS)) == expected

    @settings(max_examples=8, deadline=None)
    @given(schedule=schedules())
    def check(schedule: Schedule) -> None:
        assert play(engine, REQUESTS, schedule) == expected

    check()


@pytest.mark.slow
def test_bits_are_equal_with_int8_weights(tmp_path: Path) -> None:
    """In INT8 mode, small linear layers and the MoE routers stay float32."""
    make_checkpoint(tmp_path, "qwen2-moe")
    engine = make_engine(tmp_path, quantization="int8")
    expected = merge(run_separately(engine, REQUESTS))
    for threads in (1, 2):
        schedule = Schedule(max_batched_tokens=11, num_blocks=30, threads=threads)
        assert play(engine, REQUESTS, schedule) == expected


def received_bits(attached: AttachedRouter, request: int, attempt: int) -> list[tuple[Any, ...]]:
    """Return the positions, tokens and logprobs of an answer."""
    return [
        (
            step.position[entry.row],
            step.token[entry.row],
            (entry.chosen, entry.rank, *entry.tokens, *entry.values),
        )
        for step in (message.step for message in attached.received)
        for entry in step.logprobs
        if (step.request[entry.row], step.attempt[entry.row]) == (request, attempt)
    ]


@pytest.mark.slow
@pytest.mark.asyncio
async def test_bits_are_equal_after_a_kv_transfer(folder: Path) -> None:
    sizes: dict[str, Any] = {"kv_cache_mib": 1, "transfer_seconds": 240.0, "deterministic": True}
    workers = [
        await serve_worker(WorkerConfig(name, folder, **sizes)) for name in ("prefill", "decode")
    ]
    pools = await DisaggregatedPair.open(*(worker.address for worker in workers))
    prompt = REQUESTS[0].prompt
    params: dict[str, Any] = {"temperature": 0.8, "seed": 9, "logprobs": 3}
    await pools.decode.submit(1000, prompt, greedy(12, **params), salt=b"alone")
    await pools.decode.answer(1000)
    moving = await pools.prefill_and_yield(prompt, 12, **params)
    await moving.finish()
    await pools.decode.message("received", moving.request)
    moved = received_bits(pools.prefill, moving.request, 1) + received_bits(
        pools.decode, moving.request, 2
    )
    assert len(moved) == 12
    assert moved == received_bits(pools.decode, 1000, 1)
    await pools.close()
    for worker in workers:
        await worker.stop()


def test_bfloat16_on_a_cpu_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"deterministic mode is not available: .*float32"):
        make_engine(folder, dtype="bfloat16")


@pytest.mark.slow
def test_transformers_backend_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt-neox")
    with pytest.raises(UnsupportedModel, match="deterministic is not supported, because"):
        make_engine(tmp_path)


def test_layout_depends_on_deterministic_mode_block_size_mesh_and_cpu(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, cpu = FORMATS["float32"], torch.device("cpu")
    given = (engine.model, engine.spec, torch.float32, form)
    assert engine.layout == layout_of(*given, numerics_of(BLOCK_SIZE, cpu, Mesh()))
    others = [layout_of(*given), layout_of(*given, numerics_of(1, cpu, Mesh()))]
    others.append(layout_of(*given, numerics_of(BLOCK_SIZE, cpu, Mesh(tp=2))))
    monkeypatch.setattr(fingerprint, "has_amx", lambda: not has_amx())
    others.append(layout_of(*given, numerics_of(BLOCK_SIZE, cpu, Mesh())))
    monkeypatch.undo()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another")
    others.append(layout_of(*given, numerics_of(BLOCK_SIZE, cpu, Mesh())))
    monkeypatch.undo()
    others.append(layout_of(*given, numerics_of(BLOCK_SIZE, cpu, Mesh()), "int8"))
    assert engine.layout not in others
