"""Quantized checkpoints of every form give the logits of their dequantized weights."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.kernels.cpu_common.cpu_features import has_avx2
from penstock.kernels.linear.cpu_packed_int8 import PackedLinearInt8, has_int8_loops
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.layers import packing
from penstock.workers.weights.loading import load_model
from tests.support.answers import check, expected_answers
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.engines import greedy_sequence, run_out
from tests.support.planner import generate
from tests.support.quantized import (
    FLOAT,
    FORMS,
    HIDDEN,
    INPUT_SCALES,
    WEIGHT_ONLY,
    make_quantized,
    small,
)
from tests.support.quantized_fp4 import FP4_AND_BITSANDBYTES

CPU = torch.device("cpu")
MAX_NEW, CHUNK = 4, 21


def prompts() -> list[list[int]]:
    numbers = np.random.default_rng(5)
    return [numbers.integers(4, VOCAB_SIZE, length).tolist() for length in (12, 37)]


ALL_FORMS = FORMS | FP4_AND_BITSANDBYTES


@pytest.mark.parametrize("name", [*WEIGHT_ONLY, *FP4_AND_BITSANDBYTES])
def test_logits_are_those_of_the_dequantized_weights(name: str, tmp_path: Path) -> None:
    reference = make_quantized(tmp_path, ALL_FORMS[name])
    _, decoder = load_model(tmp_path, "auto", CPU)
    assert all(linear.weight.numel() == 0 for _, linear in decoder.linears())
    check(
        generate(decoder, prompts(), MAX_NEW, CHUNK),
        expected_answers(reference, prompts(), MAX_NEW),
    )


@pytest.mark.parametrize("name", ["fp8-channel-dynamic", "int8-channel", "packed-4-groups"])
def test_head_may_be_quantized(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    form = replace(form, config=form.config | {"ignore": [], "lm_head": True})
    reference = make_quantized(tmp_path, form, quantizes_head=True)
    _, decoder = load_model(tmp_path, "auto", CPU)
    assert decoder.head is not None
    assert decoder.head.weight.numel() == 0
    expected = expected_answers(reference, prompts(), MAX_NEW)
    check(generate(decoder, prompts(), MAX_NEW, CHUNK), expected)


def test_zero_biases_of_gptq_modules_are_ignored(tmp_path: Path) -> None:
    reference = make_quantized(tmp_path, FORMS["gptq-4"])
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(".qweight")]:
        outputs = tensors[name].shape[1]
        tensors[f"{name.removesuffix('.qweight')}.bias"] = torch.zeros(outputs, dtype=torch.half)
    save_file(tensors, tmp_path / "model.safetensors")
    _, decoder = load_model(tmp_path, "auto", CPU)
    expected = expected_answers(reference, prompts(), MAX_NEW)
    check(generate(decoder, prompts(), MAX_NEW, CHUNK), expected)


def test_static_scales_of_the_kv_cache_are_ignored(tmp_path: Path) -> None:
    make_quantized(tmp_path, FORMS["fp8-hugging-face-tensor"])
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("kv_scale", "k_scale", "v_scale", "k_proj.output_scale"):
        tensors[f"model.layers.0.self_attn.{name}"] = torch.tensor(0.5)
    save_file(tensors, tmp_path / "model.safetensors")
    load_model(tmp_path, "auto", CPU)


def make_engine(folder: Path, **other: Any) -> Engine:
    sizes = {"kv_cache_mib": 1, "max_sequences": 8, "max_batched_tokens": 32}
    engine = Engine(WorkerConfig("w", folder, **{**sizes, **other}))
    engine.warm_up()
    return engine


def answers(engine: Engine) -> list[list[int]]:
    for number, prompt in enumerate(prompts()):
        engine.submit(greedy_sequence(number, prompt, MAX_NEW))
    found = run_out(engine)
    return [found[number] for number in range(len(prompts()))]


@pytest.mark.parametrize("deterministic", [False, True])
def test_engine_serves_quantized_checkpoints(deterministic: bool, tmp_path: Path) -> None:
    if deterministic and not has_avx2():
        pytest.skip("needs AVX2")
    layouts = []
    for name in ("fp8-blocks", "awq", "nvfp4", "bitsandbytes-nf4-nested"):
        reference = make_quantized(tmp_path / name, ALL_FORMS[name])
        engine = make_engine(tmp_path / name, deterministic=deterministic)
        assert answers(engine) == expected_answers(reference, prompts(), MAX_NEW)[0]
        layouts.append(engine.layout)
    assert len(set(layouts)) == 4


def test_int8_products_are_those_of_quantization_while_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    make_quantized(tmp_path / "int8", FORMS["int8-products"])
    stored = load_model(tmp_path / "int8", "auto", CPU)[1]
    make_quantized(tmp_path / "float", FLOAT)
    online = load_model(tmp_path / "float", "auto", CPU, quantization="int8")[1]
    assert stored.head is not None
    assert online.head is not None
    # Online quantization also quantizes the head; the stored checkpoint does not.
    stored.head.packed = online.head.packed
    found, expected = (generate(each, prompts(), MAX_NEW, CHUNK) for each in (stored, online))
    assert found[0] == expected[0]
    for ours, theirs in zip(found[1], expected[1], strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.skipif(not has_int8_loops(), reason="needs AVX2 or VNNI")
def test_static_scales_of_activations_are_used(tmp_path: Path) -> None:
    reference = make_quantized(tmp_path, FORMS["int8-static"])
    _, decoder = load_model(tmp_path, "auto", CPU)
    layers = [linear for names, linear in decoder.linears() if names != ("lm_head",)]
    for linear in layers:
        scale = INPUT_SCALES[linear.weight.shape[1] != HIDDEN]
        assert isinstance(linear.packed, PackedLinearInt8)
        assert linear.packed.input_limit == pytest.approx(127 * scale)
    scale, linear = INPUT_SCALES[0], layers[0]
    codes = torch.randint(-127, 128, (9, HIDDEN)).double()
    x = codes + torch.rand(9, HIDDEN) * 0.8 - 0.4  # far from ties
    x[0, :5], codes[0, :5] = 1000.0, 127  # clipped
    weight = reference.model.layers[0].self_attn.q_proj.weight.double()
    expected = scale * codes @ weight.T
    found = linear((scale * x).float())[:, : len(weight)].double()
    # The bound counts the roundings of both scales, of two products and of the weights.
    bound = 6 * 2.0**-24 * (scale * codes.abs() @ weight.abs().T)
    assert ((found - expected).abs() <= bound).all()


@pytest.mark.skipif(not has_int8_loops(), reason="needs AVX2 or VNNI")
@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"k_proj.input_scale": torch.tensor(0.5)}, 0.5),
        ({"k_proj.input_scale": torch.tensor([[0.5]], dtype=torch.bfloat16)}, 0.5),
        ({"k_proj.input_scale": torch.tensor(torch.nan)}, INPUT_SCALES[0]),
        # Scales are computed at run time if a fused module has none, or if none can be used.
        ({"k_proj.input_scale": None}, 0),
        ({"k_proj.input_scale": torch.empty(0)}, 0),
        ({f"{name}_proj.input_scale": torch.zeros(1) for name in "qkv"}, 0),
        ({f"{name}_proj.input_scale": torch.tensor(1e-41) for name in "qkv"}, 0),
        (
            {f"{name}_proj.input_scale": None for name in "qkv"}
            | {f"{name}_proj.activation_scale": torch.tensor(0.25) for name in "qkv"},
            0.25,
        ),
    ],
)
def test_fused_modules_use_the_largest_static_scale(
    changes: dict[str, torch.Tensor | None], scale: float, tmp_path: Path
) -> None:
    make_quantized(tmp_path, FORMS["int8-static"])
    path, module = tmp_path / "model.safetensors", "model.layers.0.self_attn"
    tensors: dict[str, Any] = load_file(path)
    tensors |= {f"{module}.{name}": tensor for name, tensor in changes.items()}
    save_file({name: each for name, each in tensors.items() if each is not None}, path)
    _, decoder = load_model(tmp_path, "auto", CPU)
    [packed] = [linear.packed for names, linear in decoder.linears() if f"{module}.k_proj" in names]
    assert isinstance(packed, PackedLinearInt8)
    assert packed.input_limit == pytest.approx(scale * 127)


@pytest.mark.parametrize("config", [lambda: None, lambda: mixtral()])
def test_step_graph_uses_static_scales(config: Callable[[], Any], tmp_path: Path) -> None:
    make_quantized(tmp_path, FORMS["int8-static"], config())
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in tensors:
        if "experts.1." in name and name.endswith("input_scale"):
            tensors[name] *= 3
    save_file(tensors, path)
    _, decoder = load_model(tmp_path, "auto", CPU)
    expected = generate(decoder, prompts(), MAX_NEW, CHUNK)[0]
    assert answers(make_engine(tmp_path)) == expected


def mixtral() -> Any:
    return transformers.MixtralConfig(
        **small(), num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
    )


def deepseek() -> Any:
    return transformers.DeepseekV3Config(
        **small() | {"num_key_value_heads": 4},
        q_lora_rank=64,
        kv_lora_rank=96,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        moe_intermediate_size=160,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        tie_word_embeddings=False,
    )


@pytest.mark.parametrize("name", ["fp8-blocks", "gptq-4-act-order", "awq-32", "mxfp4"])
@pytest.mark.parametrize("config", [mixtral, deepseek])
def test_experts_and_latent_attention_take_every_form(
    name: str, config: Callable[[], Any], tmp_path: Path
) -> None:
    reference = make_quantized(tmp_path, ALL_FORMS[name], config())
    _, decoder = load_model(tmp_path, "auto", CPU)
    expected = expected_answers(reference, prompts(), MAX_NEW)
    check(generate(decoder, prompts(), MAX_NEW, CHUNK), expected)


def test_grouped_rows_of_falcon_are_reordered(tmp_path: Path) -> None:
    config = transformers.FalconConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=6,
        num_kv_heads=3, new_decoder_architecture=True, bias=False, ffn_hidden_size=256,
        bos_token_id=0, eos_token_id=1, tie_word_embeddings=False,
    )  # fmt: skip
    reference = make_quantized(tmp_path, FORMS["packed-4-groups"], config)
    _, decoder = load_model(tmp_path, "auto", CPU)
    expected = expected_answers(reference, prompts(), MAX_NEW)
    check(generate(decoder, prompts(), MAX_NEW, CHUNK), expected)
