"""Float checkpoints that are quantized while they are loaded (`--quantization`)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock.kernels.cpu_common.cpu_features import has_avx2
from penstock.kernels.linear import quantized
from penstock.kernels.linear.quantize_weights import WEIGHT_FORMS, WeightForm
from penstock.kernels.linear.quantized import QuantizedMatrix, TiledLinear
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.layers import online_method, packing
from penstock.workers.layers.linear import Linear
from penstock.workers.models.config import UnsupportedModel
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.spec import read_spec
from penstock.workers.parallel.mesh import BadShape, Mesh
from penstock.workers.parallel.parallel_groups import SINGLE_RANK
from penstock.workers.weights.loading import load_model
from penstock.workers.weights.regions import Region
from penstock.workers.weights.sharding import regions
from tests.support.answers import check, expected_answers
from tests.support.checkpoints import VOCAB_SIZE, make_tokenizer
from tests.support.planner import generate
from tests.support.quantized import small
from tests.support.ranks import make_model
from tests.support.rounded import ROUNDED
from tests.workers.weights.test_sharding import ranks_of, region_mask

CPU = torch.device("cpu")
MAX_NEW, CHUNK = 4, 21


def llama() -> Any:
    return transformers.LlamaConfig(**small(), tie_word_embeddings=False)


def mixtral() -> Any:
    return transformers.MixtralConfig(
        **small(), num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
    )


def gpt_oss() -> Any:
    return transformers.GptOssConfig(
        **small(), num_local_experts=4, num_experts_per_tok=2, head_dim=48, sliding_window=16,
        tie_word_embeddings=False,
    )  # fmt: skip


def make_float(folder: Path, form: WeightForm, config: Any) -> Any:
    """Write a float checkpoint; return the `transformers` model with rounded weights."""
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.1)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("embed", "norm", "router", ".gate.", "bias", "sinks")):
            continue
        weights = parameter.data if parameter.dim() == 3 else parameter.data[None]
        is_transposed = parameter.dim() == 3 and isinstance(config, transformers.GptOssConfig)
        for weight in weights:
            rows = weight.T if is_transposed else weight
            rows.copy_(ROUNDED[form](rows.clone()))
    return model


def prompts() -> list[list[int]]:
    numbers = np.random.default_rng(5)
    return [numbers.integers(4, VOCAB_SIZE, length).tolist() for length in (12, 37)]


@pytest.fixture
def float_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiply 4-bit weights as a CPU without VNNI does, which does not quantize activations.

    `tests/kernels/linear/test_cpu_packed_int4.py` tests products with quantized activations.
    """
    monkeypatch.setattr(quantized, "has_int4_loops", lambda: False)


@pytest.mark.parametrize("form", ["fp8", "int4"])
@pytest.mark.parametrize("config", [llama, mixtral, gpt_oss])
@pytest.mark.usefixtures("float_activations")
def test_logits_are_those_of_the_rounded_weights(
    form: WeightForm, config: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    reference = make_float(tmp_path, form, config())
    _, decoder = load_model(tmp_path, "auto", CPU, quantization=form)
    assert all(linear.weight.numel() == 0 for linear in packing.linears(decoder))
    assert all(stack.weight is None for _, stack in decoder.stacks())
    check(
        generate(decoder, prompts(), MAX_NEW, CHUNK),
        expected_answers(reference, prompts(), MAX_NEW),
    )


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the codes of all layers unpacked."""

    def keep(linear: Linear, matrix: QuantizedMatrix) -> None:
        linear.packed = TiledLinear(matrix, linear.bias)

    monkeypatch.setattr(online_method, "pack_codes", keep)
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)


def matrices(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Return the dequantized weights by the names of the checkpoint; stacks are [E, in, out]."""
    found: dict[str, torch.Tensor] = {}
    quantized = {id(linear) for linear in packing.linears(decoder)}
    for names, linear in decoder.linears():
        if id(linear) in quantized:
            rows = torch.split(dequantized(linear), linear.module_sizes(names))
            found |= {f"{name}.weight": part for name, part in zip(names, rows, strict=True)}
    for name, stack in decoder.stacks():
        found[name] = torch.stack([dequantized(linear).T for linear in stack.linears])
    return found


def dequantized(linear: Linear) -> torch.Tensor:
    assert isinstance(linear.packed, TiledLinear)
    return linear.packed.matrix.dequantize()


@pytest.mark.parametrize("form", WEIGHT_FORMS)
@pytest.mark.parametrize(
    ("name", "shape"),
    [("llama", (2, 1, 1)), ("llama", (4, 1, 1)), ("phi3", (2, 2, 1)), ("qwen2-moe", (2, 1, 1)),
     ("qwen2-moe", (4, 1, 2)), ("gpt-oss", (2, 1, 1)), ("gpt-oss", (4, 1, 2))],
)  # fmt: skip
def test_every_rank_has_the_codes_of_one_rank(
    name: str, shape: tuple[int, int, int], form: WeightForm, tmp_path: Path, held: None
) -> None:
    folder, mesh = make_model(tmp_path, name), Mesh(*shape)
    spec = read_spec(folder)
    whole = matrices(load_model(folder, "auto", CPU, quantization=form)[1])
    assert whole
    for rank in range(mesh.num_ranks):
        coord = mesh.coord(rank)
        cuts: dict[str, Region] = regions(spec, coord)
        _, part = load_model(folder, "auto", CPU, quantization=form, ranks=ranks_of(coord))
        for tensor, weights in matrices(part).items():
            expected = whole[tensor][region_mask(whole[tensor], cuts.get(tensor, ()))]
            assert torch.equal(weights, expected.view(weights.shape)), tensor


def test_same_layers_are_quantized_on_every_rank(tmp_path: Path) -> None:
    """If a layer is large enough, it is quantized, although the shard of a rank may be small."""
    folder = make_model(tmp_path, "llama", hidden_size=64, intermediate_size=256, head_dim=16)
    methods = []
    for mesh in (Mesh(1), Mesh(2), Mesh(4)):
        ranks = SINGLE_RANK if mesh.tp == 1 else ranks_of(mesh.coord(mesh.tp - 1))
        _, decoder = load_model(folder, "auto", CPU, quantization="fp8", ranks=ranks)
        methods.append([linear.method.name for _, linear in decoder.linears()])
    assert len(set(methods[0])) == 2
    assert methods[0] == methods[1] == methods[2]


def test_layout_names_the_form(tmp_path: Path) -> None:
    make_float(tmp_path, "fp8", llama())
    layouts = {make_engine(tmp_path, form).layout for form in ("none", *WEIGHT_FORMS)}
    assert len(layouts) == 4


def make_engine(folder: Path, quantization: str, **other: Any) -> Engine:
    sizes = {"kv_cache_mib": 1, "max_sequences": 8, "max_batched_tokens": 32}
    given = {**sizes, "kv_cache_dtype": "float32", **other}
    return Engine(WorkerConfig("w", folder, quantization=quantization, **given))


@pytest.mark.skipif(not has_avx2(), reason="needs AVX2")
@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_deterministic_mode_accepts_weight_only_forms(form: str, tmp_path: Path) -> None:
    make_float(tmp_path, "fp8", llama())
    make_engine(tmp_path, form, deterministic=True).warm_up()


def test_deterministic_mode_refuses_bfloat16(tmp_path: Path) -> None:
    make_float(tmp_path, "fp8", llama())
    with pytest.raises(ValueError, match=r"deterministic mode is not available: int4 weights"):
        load_model(tmp_path, "bfloat16", CPU, quantization="int4", deterministic=True)


def test_odd_numbers_of_inputs_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    odd = make_model(tmp_path / "odd", "llama", intermediate_size=33)
    with pytest.raises(UnsupportedModel, match=r"layers.0.mlp.down_proj has 33 inputs, an odd"):
        load_model(odd, "auto", CPU, quantization="int4")
    load_model(odd, "auto", CPU, quantization="fp8")
    cut = make_model(tmp_path / "cut", "llama", intermediate_size=66)
    with pytest.raises(BadShape, match=r"layers.0.mlp.down_proj: a rank has 33 inputs"):
        load_model(cut, "auto", CPU, quantization="int4", ranks=ranks_of(Mesh(2).coord(0)))
