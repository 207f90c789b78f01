"""Probing of transformers models: a model with an unsupported feature is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import masking_utils

from penstock.workers.models import spec
from penstock.workers.models.config import BadCheckpoint, UnsupportedModel
from penstock.workers.models.transformers_backend.probe import (
    AttentionCall,
    MaskProbe,
    Unsupported,
    check_layers,
    check_options,
    probe_model,
    read_window,
)
from penstock.workers.weights.loading import SINGLE, load
from tests.support.answers import check, expected_answers
from tests.support.checkpoints import COMMON, LONG_ROPE, make_checkpoint
from tests.support.planner import generate

CPU = torch.device("cpu")
LONG = LONG_ROPE | {
    "short_factor": [1.0] * 6,
    "long_factor": [2.0] * 6,
    "short_mscale": 1.0,
    "long_mscale": 1.2,
    "original_max_position_embeddings": 64,
}


def save(folder: Path, config: Any) -> Path:
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.25)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Mamba", {"num_attention_heads": None}, "Mamba.* keeps other state than keys and values"),
        ("StableLm", {}, "StableLm.* does not use the attention interface"),
        ("DiffLlama", {}, "DiffLlama.* calls the attention function more than once"),
        (
            "Lfm2",
            {"layer_types": ["conv", "full_attention"]},
            "Lfm2.* cache has layers of type ",
        ),
        ("Moshi", {"sliding_window": 13}, "Moshi.* cache has a window of 13 positions"),
        (
            "Phimoe",
            {"rope_parameters": LONG},
            "Phimoe.* longrope, the rotary embedding .*would depend .*max_model_len to 64 or less",
        ),
    ],
)
def test_unsupported_model_features_are_refused_with_the_architecture_name(
    tmp_path: Path, kind: str, changes: dict[str, Any], message: str
) -> None:
    values = {
        key: value
        for key, value in (COMMON | changes).items()
        if value is not None or key == "pad_token_id"
    }
    config = getattr(transformers, f"{kind}Config")(**values)
    with pytest.raises(UnsupportedModel, match=message):
        load(save(tmp_path, config), "auto", CPU)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("olmo")
    make_checkpoint(path, "olmo")
    return path


def copy(folder: Path, to: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text()) | changes
    (to / "config.json").write_text(json.dumps(config))
    (to / SINGLE).write_bytes((folder / SINGLE).read_bytes())
    return to


def test_chunked_attention_is_accepted_up_to_the_length_of_one_chunk(tmp_path: Path) -> None:
    """Llama 4 attention is plain causal while `max_model_len` is at most the chunk size."""
    kinds = {"attention_chunk_size": 24, "intermediate_size_mlp": 40, "head_dim": 12}
    save(tmp_path, transformers.Llama4TextConfig(**COMMON | kinds))
    with pytest.raises(UnsupportedModel, match="neither causal nor a causal sliding window"):
        load(tmp_path, "auto", CPU)
    found, _ = load(tmp_path, "auto", CPU, max_model_len=24)
    assert found.max_model_len == 24


def test_text_model_of_a_multimodal_llama_4_is_served(tmp_path: Path) -> None:
    text = COMMON | {"attention_chunk_size": 48, "intermediate_size_mlp": 40, "head_dim": 12}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "intermediate_size": 64, "vision_output_dim": 32, "image_size": 28, "patch_size": 14,
              "projector_input_dim": 32, "projector_output_dim": 32}  # fmt: skip
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    reference: Any = transformers.Llama4ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(0.0, 0.25)
    reference.save_pretrained(tmp_path)
    assert spec.read_config(tmp_path).values["architectures"] == ["Llama4ForConditionalGeneration"]
    _, model = load(tmp_path, "float32", CPU, max_model_len=48)
    prompts = [list(range(4, 16)), list(range(3, 40))]
    check(generate(model, prompts, 6, 21), expected_answers(reference, prompts, 6))


def test_error_names_transformers_if_it_is_not_installed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedModel, match=r"OlmoForCausalLM .*pip install transformers"):
        load(folder, "auto", CPU)
    with pytest.raises(UnsupportedModel, match=r"pip install transformers.*LlamaForCausalLM"):
        spec.check_config(folder)


def test_code_in_a_checkpoint_is_never_run(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("raise SystemExit('it ran')")
    where = {"AutoConfig": "odd.Config", "AutoModelForCausalLM": "odd.Model"}
    copy(folder, tmp_path, auto_map=where, model_type="odd", architectures=["OddForCausalLM"])
    with pytest.raises(UnsupportedModel, match="OddForCausalLM is not supported"):
        load(tmp_path, "auto", CPU)


def test_architecture_that_does_not_match_the_config_class_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    copy(folder, tmp_path, architectures=["OlmoForSequenceClassification"])
    with pytest.raises(UnsupportedModel, match="as another architecture, OlmoForCausalLM"):
        load(tmp_path, "auto", CPU)


def test_missing_weights_are_refused_not_initialized(folder: Path, tmp_path: Path) -> None:
    copy(folder, tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"weights are missing, .*layers\.1\.mlp\.up_proj"):
        load(tmp_path, "auto", CPU)


def test_pickled_weights_are_never_loaded(folder: Path, tmp_path: Path) -> None:
    copy(folder, tmp_path)
    (tmp_path / SINGLE).rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match="pickled weights only"):
        load(tmp_path, "auto", CPU)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        ({}, {"position_bias": torch.zeros(1)}, "passes the unsupported option position_bias"),
        ({}, {"is_causal": False}, "not causal"),
        ({"is_causal": False}, {}, "not causal"),
        ({}, {"dropout": 0.1}, "has a dropout of"),
        ({"sinks": torch.zeros(4)}, {}, "sinks, but does not pass them"),
    ],
)
def test_unsupported_attention_options_are_refused(
    module: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(Unsupported, match=message):
        check_options(SimpleNamespace(**module), options)


@given(st.integers(1, 50), st.integers(4, 40))
def test_sliding_window_size_is_read_from_the_mask_function(size: int, max_model_len: int) -> None:
    def read(function: Any) -> int:
        return read_window({"mask_function": function}, max_model_len)

    assert read(masking_utils.causal_mask_function) == 0
    window = read(masking_utils.sliding_window_causal_mask_function(size))
    assert window == (size if size < max_model_len else 0)
    chunked = masking_utils.chunked_causal_mask_function(size, torch.zeros(1, dtype=torch.int64))
    if 1 < size < max_model_len:
        with pytest.raises(Unsupported, match="neither causal nor a causal"):
            read(chunked)
    with pytest.raises(Unsupported, match="neither causal nor a causal"):
        read(masking_utils.bidirectional_mask_function)


def layers(*heads: tuple[int, int]) -> dict[int, AttentionCall]:
    return {number: AttentionCall(*pair, head_dim=8, window=0) for number, pair in enumerate(heads)}


def test_layers_with_fewer_kv_heads_are_accepted_if_the_heads_can_be_repeated() -> None:
    assert len(check_layers(layers((8, 2), (8, 4), (4, 1)), 3)) == 3
    with pytest.raises(Unsupported, match=r"layer 0 has 6 query heads and 2 KV heads, .* has 3"):
        check_layers(layers((6, 2), (6, 3)), 2)
    with pytest.raises(Unsupported, match=r"layer 1 has 6 query heads and 2 KV heads, .* has 4"):
        check_layers(layers((8, 4), (6, 2)), 2)
    with pytest.raises(Unsupported, match=r"the layers \[0, 1\] use the attention interface"):
        check_layers(layers((8, 2), (8, 4)), 3)


def test_model_that_computes_with_its_mask_is_refused() -> None:
    for use in (lambda mask: mask.shape, lambda mask: mask[0], lambda mask: hasattr(mask, "dtype")):
        with pytest.raises(Unsupported, match="reads or changes its attention masks"):
            use(MaskProbe(0))


def test_token_interaction_outside_of_attention_is_refused() -> None:
    def shifted(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return (tokens + tokens.roll(1)).float()[:, None]

    def counted(tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return torch.arange(len(tokens)).float()[:, None]

    for run in (shifted, counted):
        with pytest.raises(Unsupported, match="interact outside of attention"):
            probe_model(run, 1, 64, CPU)
