"""Expert weights in MXFP4 (gpt-oss): layout, logits, several ranks, and bad checkpoints."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.kernels.linear.quantized import QuantizedMatrix, TiledLinear
from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.layers.linear import Linear
from penstock.workers.models.config import BadCheckpoint, UnsupportedModel
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.spec import read_spec
from penstock.workers.parallel.mesh import Mesh
from penstock.workers.weights import mxfp4_stacks
from penstock.workers.weights.loading import SINGLE, load_model
from penstock.workers.weights.sharding import regions
from tests.support.answers import check, expected_answers
from tests.support.checkpoints import VOCAB_SIZE, make_tokenizer
from tests.support.planner import generate
from tests.support.quantized import small
from tests.support.quantized_fp4 import low_first, mx_blocks
from tests.workers.weights.test_sharding import ranks_of, region_mask

CPU = torch.device("cpu")
MAX_NEW, CHUNK = 4, 21
NOT_CONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
STACKS = ("gate_up_proj", "down_proj")
NAME = "model.layers.1.mlp.experts.down_proj"


def make_gpt_oss(folder: Path, **changes: Any) -> Any:
    """Write a checkpoint in MXFP4; return the `transformers` model of the dequantized weights."""
    torch.manual_seed(0)
    sizes = small() | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 48} | changes
    config = transformers.GptOssConfig(**sizes, sliding_window=16, tie_word_embeddings=False)
    model: Any = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    stored = {}
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.1)
        if name.endswith(STACKS):  # shape [experts, in, out]
            codes, exponents, dequantized = mx_blocks(parameter.data.transpose(1, 2).contiguous())
            parameter.data.copy_(dequantized.transpose(1, 2))
            stored[f"{name}_blocks"] = low_first(codes).view(*codes.shape[:2], -1, 16)
            stored[f"{name}_scales"] = torch.from_numpy(exponents.astype(np.uint8))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    make_tokenizer(folder)
    path = folder / "config.json"
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_CONVERTED}
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization})
    )
    tensors = {name: each for name, each in load_file(folder / SINGLE).items()
               if not name.endswith(STACKS)}  # fmt: skip
    save_file(tensors | stored, folder / SINGLE)
    return model


def prompts() -> list[list[int]]:
    numbers = np.random.default_rng(5)
    return [numbers.integers(4, VOCAB_SIZE, length).tolist() for length in (12, 37)]


def test_logits_are_those_of_the_dequantized_weights(tmp_path: Path) -> None:
    reference = make_gpt_oss(tmp_path)
    _, decoder = load_model(tmp_path, "auto", CPU)
    assert decoder.linear_methods == "mxfp4 groups of 32"
    assert all(stack.weight is None for _, stack in decoder.stacks())
    check(
        generate(decoder, prompts(), MAX_NEW, CHUNK),
        expected_answers(reference, prompts(), MAX_NEW),
    )


def test_engine_serves_the_checkpoint(tmp_path: Path) -> None:
    make_gpt_oss(tmp_path)
    config = WorkerConfig(
        "w", tmp_path, kv_cache_mib=1, max_model_len=128, max_sequences=8, max_batched_tokens=32
    )
    Engine(config).warm_up()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep all stacks as codes, and do not pack them for a kernel."""

    def keep(linear: Linear, matrix: QuantizedMatrix) -> None:
        linear.packed = TiledLinear(matrix, linear.bias)

    monkeypatch.setattr(mxfp4_stacks, "pack_codes", keep)


def stacks(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Return the dequantized stacks [E, in, out] by name."""
    found: dict[str, torch.Tensor] = {}
    for name, stack in decoder.stacks():
        packed = [linear.packed for linear in stack.linears]
        assert all(isinstance(each, TiledLinear) for each in packed)
        found[name] = torch.stack([each.matrix.dequantize().T for each in packed])  # type: ignore[union-attr]
    return found


def test_weights_are_those_of_transformers(tmp_path: Path, held: None) -> None:
    make_gpt_oss(tmp_path)
    stored = load_file(tmp_path / SINGLE)
    for name, weights in stacks(load_model(tmp_path, "auto", CPU)[1]).items():
        parts = stored[f"{name}_blocks"], stored[f"{name}_scales"]
        assert torch.equal(weights, convert_moe_packed_tensors(*parts, dtype=torch.float32))


@pytest.mark.parametrize("shape", [(2, 1, 1), (4, 1, 1), (4, 1, 2), (2, 2, 2)])
def test_every_rank_has_the_weights_of_one_rank(
    shape: tuple[int, int, int], tmp_path: Path, held: None
) -> None:
    """With 288 inputs divided among four ranks, a rank's inputs begin and end inside blocks."""
    make_gpt_oss(tmp_path, intermediate_size=288, num_key_value_heads=4)
    mesh, spec = Mesh(*shape), read_spec(tmp_path)
    whole = stacks(load_model(tmp_path, "auto", CPU)[1])
    for rank in range(mesh.num_ranks):
        coord = mesh.coord(rank)
        found = stacks(load_model(tmp_path, "auto", CPU, ranks=ranks_of(coord))[1])
        assert found
        for name, weights in found.items():
            mask = region_mask(whole[name], regions(spec, coord).get(name, ()))
            assert torch.equal(weights, whole[name][mask].view(weights.shape)), name


@pytest.mark.parametrize(
    ("suffix", "shape", "value", "message"),
    [
        ("scales", (4, 192, 10), 255, r"down_proj_scales has the scale byte 255 \(NaN\)"),
        ("scales", (4, 192, 9), 127, r"down_proj_scales has shape \[4, 192, 9\].*\[4, 192, 10\]"),
        ("blocks", (4, 192, 10, 8), 0, r"down_proj_blocks has shape \[4, 192, 10, 8\].*10, 16\]"),
        ("blocks", (3, 192, 10, 16), 0, r"down_proj_blocks has shape \[3, 192, 10, 16\]"),
    ],
)
def test_files_that_contradict_themselves_are_refused(
    suffix: str, shape: tuple[int, ...], value: int, message: str, tmp_path: Path
) -> None:
    make_gpt_oss(tmp_path)
    changed = torch.full(shape, value, dtype=torch.uint8)
    tensors = load_file(tmp_path / SINGLE) | {f"{NAME}_{suffix}": changed}
    save_file(tensors, tmp_path / SINGLE)
    with pytest.raises(BadCheckpoint, match=message):
        load_model(tmp_path, "auto", CPU)


def test_missing_and_excluded_stacks_are_refused(tmp_path: Path) -> None:
    make_gpt_oss(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    save_file(
        {name: each for name, each in tensors.items() if name != f"{NAME}_scales"},
        tmp_path / SINGLE,
    )
    with pytest.raises(BadCheckpoint, match=rf"lacks tensor {NAME}_scales"):
        load_model(tmp_path, "auto", CPU)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"lm_head"', '"model.layers.1.mlp.experts"'))
    with pytest.raises(UnsupportedModel, match=r"layers.1.mlp.experts.gate_up_proj is excluded"):
        load_model(tmp_path, "auto", CPU)


def test_blocks_must_divide_the_inputs(tmp_path: Path) -> None:
    make_gpt_oss(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(
        path.read_text().replace('"intermediate_size": 320', '"intermediate_size": 336')
    )
    with pytest.raises(
        UnsupportedModel, match=r"down_proj has 336 inputs: expected a multiple of 32"
    ):
        load_model(tmp_path, "auto", CPU)


def test_quantization_while_loading_is_refused(tmp_path: Path) -> None:
    make_gpt_oss(tmp_path)
    with pytest.raises(ValueError, match=r"int4 is not available: .* is quantized already"):
        load_model(tmp_path, "auto", CPU, quantization="int4")
