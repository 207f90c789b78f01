"""CPU step graphs match transformers; unsupported models and steps run without a graph."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from penstock.kernels.cpu_common.deferred_loops import defer, finish
from penstock.kernels.cpu_compilation import required_groups
from penstock.kernels.kv_cache.format import FORMATS, KvCacheFormat
from penstock.kernels.linear import cpu_packed_f32, cpu_packed_int8
from penstock.kernels.linear.cpu_packed_int4 import has_int4_loops
from penstock.kernels.moe.routing import Routing
from penstock.kernels.step_graph.graph import CpuStepGraph
from penstock.kernels.step_graph.opcodes import (
    MATMUL_F32,
    MATMUL_INT4,
    MATMUL_QUANTIZED,
    OPCODE,
    Extensions,
)
from penstock.workers.config import WorkerConfig
from penstock.workers.engine import model_runner
from penstock.workers.layers import packing
from penstock.workers.layers.moe import MoE
from penstock.workers.layers.norm import LayerNorm
from penstock.workers.models import cpu_step_graph
from penstock.workers.models.cpu_step_graph import MAX_ROWS, DecodeStepGraph, build_cpu_step_graph
from penstock.workers.models.decoder import Decoder
from penstock.workers.rank.cpu_kernels import kernel_needs
from penstock.workers.scheduling.sequence import StepPlan
from penstock.workers.weights.loading import load
from tests.support.answers import check, expected_answers
from tests.support.planner import Planner, generate, make_cache
from tests.support.step_graph_checkpoints import COMPATIBLE_SIZES, make_compatible

CPU = torch.device("cpu")
MAX_NEW = 12
LENGTHS = (3, 17, 40)

SMALL_EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}

SUPPORTED: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**COMPATIBLE_SIZES),
    "llama, an odd vocabulary": lambda: transformers.LlamaConfig(
        **COMPATIBLE_SIZES | {"vocab_size": 307}
    ),
    "llama, biases": lambda: transformers.LlamaConfig(
        **COMPATIBLE_SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "mistral, a window": lambda: transformers.MistralConfig(**COMPATIBLE_SIZES, sliding_window=13),
    "qwen2": lambda: transformers.Qwen2Config(**COMPATIBLE_SIZES),
    "qwen3, norms of heads": lambda: transformers.Qwen3Config(**COMPATIBLE_SIZES),
    "gemma2, norms after, caps": lambda: transformers.Gemma2Config(
        **COMPATIBLE_SIZES, sliding_window=13, query_pre_attn_scalar=24
    ),
    "mixtral": lambda: transformers.MixtralConfig(**COMPATIBLE_SIZES, num_local_experts=4),
    "qwen2 moe, a shared expert": lambda: transformers.Qwen2MoeConfig(
        **COMPATIBLE_SIZES, **SMALL_EXPERTS
    ),
    "qwen2 moe, experts in every other layer": lambda: transformers.Qwen2MoeConfig(
        **COMPATIBLE_SIZES, **SMALL_EXPERTS, decoder_sparse_step=2
    ),
    "qwen3 moe": lambda: transformers.Qwen3MoeConfig(
        **COMPATIBLE_SIZES, **SMALL_EXPERTS, norm_topk_prob=False
    ),
    "qwen3 moe, weights that sum to one": lambda: transformers.Qwen3MoeConfig(
        **COMPATIBLE_SIZES, **SMALL_EXPERTS, norm_topk_prob=True
    ),
    "gemma3, two rotaries": lambda: transformers.Gemma3TextConfig(
        **COMPATIBLE_SIZES, sliding_window=13, query_pre_attn_scalar=24
    ),
}

UNSUPPORTED: dict[str, Callable[[], Any]] = {
    "layer norms": lambda: transformers.FalconConfig(
        vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=4
    ),
    "experts with a clamp": lambda: transformers.GptOssConfig(
        **COMPATIBLE_SIZES, num_local_experts=4
    ),
    "experts in groups": lambda: transformers.DeepseekV2Config(
        **COMPATIBLE_SIZES | {"num_key_value_heads": 4},
        **SMALL_EXPERTS,
        n_routed_experts=6,
        first_k_dense_replace=0,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
    ),
    "a product of odd size": lambda: transformers.LlamaConfig(
        **COMPATIBLE_SIZES | {"intermediate_size": 97}
    ),
}


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack all linear layers with several outputs, as on CPUs with AVX2."""
    # Expert gates have 64 weights and are not packed.
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 65)
    monkeypatch.setattr(cpu_packed_f32, "has_avx2", lambda: True)


def make_models(
    folder: Path, config: Any, quantization: str = "none", deterministic: bool = False
) -> tuple[Any, Decoder]:
    """Return the transformers model and the decoder loaded from its checkpoint."""
    model = make_compatible(folder, config)
    decoder = load(
        folder,
        "float32",
        torch.device("cpu"),
        quantization=quantization,
        deterministic=deterministic,
    )[1]
    assert isinstance(decoder, Decoder)
    return model, decoder


@pytest.mark.parametrize("name", SUPPORTED)
def test_graph_matches_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference, decoder = make_models(tmp_path, SUPPORTED[name]())
    graph = build_cpu_step_graph(decoder, make_cache(decoder, 4))
    assert graph is not None
    assert (graph.buffers.logits is None) == ("odd" in name)
    runs, real = [], DecodeStepGraph.run

    def run(self: DecodeStepGraph, *given: Any) -> torch.Tensor:
        runs.append(given)
        return real(self, *given)

    monkeypatch.setattr(DecodeStepGraph, "run", run)
    numbers = np.random.default_rng(5)
    prompts = [numbers.integers(4, 300, length).tolist() for length in LENGTHS]
    check(generate(decoder, prompts, MAX_NEW), expected_answers(reference, prompts, MAX_NEW))
    assert len(runs) == MAX_NEW - 1


def test_work_beside_a_step_begins_once_right_before_the_graph_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decoder = make_models(tmp_path, SUPPORTED["mistral, a window"]())
    events = list[str]()
    run_model, run_graph = model_runner.ModelRunner.run, CpuStepGraph.run

    def run(runner: model_runner.ModelRunner, plan: StepPlan) -> Tensor:
        return run_model(runner, plan, beside=lambda: events.append("beside"))

    def run_recorded(graph: CpuStepGraph, *given: Any) -> None:
        events.append("graph")
        run_graph(graph, *given)

    monkeypatch.setattr(model_runner.ModelRunner, "run", run)
    monkeypatch.setattr(CpuStepGraph, "run", run_recorded)
    generate(decoder, [[4, 5]], MAX_NEW)
    # The step that computes the prompt runs without a graph.
    assert events == ["beside", *(["beside", "graph"] * (MAX_NEW - 1))]


def run_with_and_without_graph(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch, form: KvCacheFormat = FORMATS["float32"]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the logits of each prompt's answer, from a step graph and from eager execution."""
    prompts = [list(range(4, 4 + length)) for length in LENGTHS]
    _, graph = generate(decoder, prompts, MAX_NEW, form=form)
    monkeypatch.setattr(model_runner, "build_cpu_step_graph", lambda *_: None)
    _, eager = generate(decoder, prompts, MAX_NEW, form=form)
    return graph, eager


@pytest.mark.parametrize("name", ["bfloat16", "fp8", "int8"])
def test_graph_over_a_narrow_cache_has_the_bits_of_eager_execution(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decoder = make_models(tmp_path, SUPPORTED["mistral, a window"]())
    form = FORMATS[name]
    assert build_cpu_step_graph(decoder, make_cache(decoder, 4, form)) is not None
    graph, eager = run_with_and_without_graph(decoder, monkeypatch, form)
    wide, _ = run_with_and_without_graph(decoder, monkeypatch)
    for ours, expected, exact in zip(graph, eager, wide, strict=True):
        assert torch.equal(ours, expected)
        assert not torch.equal(ours, exact)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("name", SUPPORTED)
def test_graph_has_the_bits_of_eager_execution(
    name: str, deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each layer's `lower` computes the same as its `__call__`.

    The routing to experts is equal only up to rounding, unless deterministic mode is on.
    """
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1 if deterministic else 65)
    _, decoder = make_models(tmp_path, SUPPORTED[name](), deterministic=deterministic)
    has_experts = any(isinstance(layer.mlp, MoE) for layer in decoder.layers)
    graph = build_cpu_step_graph(decoder, make_cache(decoder, 4))
    # Deterministic mode packs the routers of experts, which graphs do not support.
    assert (graph is None) == (has_experts and deterministic)
    for ours, expected in zip(*run_with_and_without_graph(decoder, monkeypatch), strict=True):
        tolerance = 1e-5 if has_experts and not deterministic else 0.0
        torch.testing.assert_close(ours, expected, rtol=0.0, atol=tolerance)


INT8_SIZES = COMPATIBLE_SIZES | {"intermediate_size": 128}
INT8: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**INT8_SIZES),
    "mixtral": lambda: transformers.MixtralConfig(**INT8_SIZES, num_local_experts=4),
}


@pytest.mark.skipif(not cpu_packed_int8.has_int8_loops(), reason="requires AVX2 or VNNI")
@pytest.mark.parametrize("name", INT8)
def test_int8_graph_matches_eager_execution(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decoder = make_models(tmp_path, INT8[name](), "int8")
    assert build_cpu_step_graph(decoder, make_cache(decoder, 4)) is not None
    for ours, expected in zip(*run_with_and_without_graph(decoder, monkeypatch), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("quantization", ["fp8", "int4"])
@pytest.mark.parametrize("name", ["llama, biases", "mixtral"])
def test_weight_only_graph_has_the_bits_of_eager_execution(
    name: str,
    quantization: str,
    deterministic: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, decoder = make_models(tmp_path, SUPPORTED[name](), quantization, deterministic)
    graph = build_cpu_step_graph(decoder, make_cache(decoder, 4))
    assert (graph is None) == (name == "mixtral" and deterministic)
    if graph is not None:
        opcodes = graph.graph.table[:, OPCODE]
        integers = quantization == "int4" and has_int4_loops()
        assert (MATMUL_INT4 if integers else MATMUL_QUANTIZED) in opcodes
        assert MATMUL_F32 not in opcodes
    tolerance = 1e-5 if name == "mixtral" and not deterministic else 0.0
    for ours, expected in zip(*run_with_and_without_graph(decoder, monkeypatch), strict=True):
        torch.testing.assert_close(ours, expected, rtol=0.0, atol=tolerance)


@pytest.mark.skipif(not cpu_packed_int8.has_int8_loops(), reason="requires AVX2 or VNNI")
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("name", INT8)
def test_interpreter_of_the_graph_is_loaded_at_the_start(
    name: str, quantization: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted: list[Extensions] = []
    monkeypatch.setattr(
        cpu_step_graph, "load_cpu_kernels", lambda cache, extensions: wanted.append(extensions)
    )
    _, decoder = make_models(tmp_path, INT8[name](), quantization)
    assert build_cpu_step_graph(decoder, make_cache(decoder, 4)) is not None
    needs = kernel_needs(WorkerConfig("w", tmp_path, quantization=quantization), CPU)
    assert needs is not None
    (found,) = (n.name for n in required_groups(needs) if n.name.startswith("program"))
    _, _, *extensions = found.split("-")
    assert "".join(f"-{each}" for each in extensions) == str(wanted[0])


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_steps_run_eagerly_until_the_deferred_loops_are_loaded(
    deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, decoder = make_models(tmp_path, SUPPORTED["llama"](), deterministic=deterministic)
    prompts = [list(range(4, 4 + length)) for length in LENGTHS]
    at_once, expected = generate(decoder, prompts, MAX_NEW)
    graph = build_cpu_step_graph(decoder, make_cache(decoder, 4))
    assert graph is not None
    runs, asked = list[StepPlan](), list[StepPlan]()
    run_graph, supports = DecodeStepGraph.run, DecodeStepGraph.supports

    def run(self: DecodeStepGraph, plan: StepPlan, *given: Any) -> Tensor:
        runs.append(plan)
        return run_graph(self, plan, *given)

    def supports_counted(self: DecodeStepGraph, plan: StepPlan) -> bool:
        asked.append(plan)
        if len(asked) == 5:
            finish(self.loops)
        return supports(self, plan)

    monkeypatch.setattr(DecodeStepGraph, "run", run)
    monkeypatch.setattr(DecodeStepGraph, "supports", supports_counted)
    monkeypatch.setattr(cpu_step_graph, "load_cpu_kernels", lambda *_: pytest.fail("not needed"))
    defer([graph.loops])
    try:
        answers, logits = generate(decoder, prompts, MAX_NEW)
    finally:
        finish(graph.loops)
    # The first step computes the prompts, and the next three ran eagerly.
    assert (len(asked), len(runs)) == (MAX_NEW, MAX_NEW - 4)
    assert answers == at_once
    for ours, others in zip(logits, expected, strict=True):
        tolerance = 0.0 if deterministic else 1e-5
        torch.testing.assert_close(ours, others, rtol=0.0, atol=tolerance)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_model_gets_no_graph(name: str, tmp_path: Path) -> None:
    _, decoder = make_models(tmp_path, UNSUPPORTED[name]())
    assert build_cpu_step_graph(decoder, make_cache(decoder, 4)) is None


@pytest.mark.parametrize(
    "routing",
    [
        Routing(2, sigmoid=True),
        Routing(2, num_groups=2, top_groups=2),
        Routing(2, scale=2.5),
    ],
    ids=["sigmoid", "groups", "scale"],
)
def test_unsupported_routing_gets_no_graph(routing: Routing, tmp_path: Path) -> None:
    _, decoder = make_models(tmp_path, SUPPORTED["mixtral"]())
    block = decoder.layers[0]
    assert isinstance(block.mlp, MoE)
    other = replace(block, mlp=replace(block.mlp, routing=routing))
    changed = replace(decoder, layers=(other, *decoder.layers[1:]))
    assert build_cpu_step_graph(changed, make_cache(decoder, 4)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"parallel": True},
        {"attention_norm": None},
        {"mlp_norm": None},
        {"attention_post_norm": LayerNorm(torch.ones(64), torch.zeros(64), 1e-5)},
    ],
    ids=["parallel", "no norm of attention", "no norm of the mlp", "a layer norm"],
)
def test_unsupported_decoder_layer_gets_no_graph(change: dict[str, Any], tmp_path: Path) -> None:
    _, decoder = make_models(tmp_path, SUPPORTED["llama"]())
    other = replace(decoder.layers[1], **change)
    changed = replace(decoder, layers=(decoder.layers[0], other))
    assert build_cpu_step_graph(changed, make_cache(decoder, 4)) is None


def test_graph_does_not_support_large_batches_or_prefill(tmp_path: Path) -> None:
    _, decoder = make_models(tmp_path, SUPPORTED["llama"]())
    graph = build_cpu_step_graph(decoder, make_cache(decoder, 4))
    assert graph is not None
    assert graph.supports(Planner([[5]] * MAX_ROWS, 1).plan(chunk=9))
    assert not graph.supports(Planner([[5]] * (MAX_ROWS + 1), 1).plan(chunk=9))
    assert not graph.supports(Planner([[5], [6, 7]], 1).plan(chunk=9))


def test_token_outside_the_vocabulary_raises(tmp_path: Path) -> None:
    _, decoder = make_models(tmp_path, SUPPORTED["llama"]())
    with pytest.raises(IndexError):
        generate(decoder, [[320]], 1)
