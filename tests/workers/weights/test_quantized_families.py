"""Families with their own tensor names or layers take 4-bit groups, FP8 blocks and AWQ.

`test_quantized_checkpoints.py` tests all forms with Llama, and families with experts, MLA and
grouped rows.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from penstock.workers.weights.loading import load_model
from tests.support.answers import check, expected_answers
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.planner import generate
from tests.support.quantized import (
    FLOAT_MODULES,
    FORMS,
    HIDDEN,
    make_quantized,
    save_float_model,
    small,
)

MAX_NEW, CHUNK = 2, 8
FORM_NAMES = ("packed-4-groups", "fp8-blocks", "awq-32")


def experts() -> dict[str, Any]:
    return small() | {
        "moe_intermediate_size": 160, "num_experts": 4, "num_experts_per_tok": 2,
        "decoder_sparse_step": 1, "tie_word_embeddings": False,
    }  # fmt: skip


def gpt(**names: Any) -> dict[str, Any]:
    return {"vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 1, **names}


CONFIGS = {
    "Qwen2-MoE": lambda: transformers.Qwen2MoeConfig(
        **experts(), shared_expert_intermediate_size=192
    ),
    "Qwen3-MoE": lambda: transformers.Qwen3MoeConfig(**experts(), head_dim=48, mlp_only_layers=[]),
    "Phi-3": lambda: transformers.Phi3Config(**small(), tie_word_embeddings=False, pad_token_id=0),
    "Gemma 3": lambda: transformers.Gemma3TextConfig(
        **small(), head_dim=48, query_pre_attn_scalar=48, sliding_window=16
    ),
    "OLMo 2": lambda: transformers.Olmo2Config(**small(), tie_word_embeddings=False),
    "GPT-J": lambda: transformers.GPTJConfig(
        **gpt(n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=192, rotary_dim=16),
        tie_word_embeddings=False,
    ),
    "BLOOM": lambda: transformers.BloomConfig(**gpt(hidden_size=HIDDEN, n_layer=2, n_head=4)),
    "MPT": lambda: transformers.MptConfig(
        **gpt(d_model=HIDDEN, n_layers=2, n_heads=4, max_seq_len=192), no_bias=True
    ),
}


@pytest.fixture(scope="module", params=CONFIGS)
def float_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_float_model(tmp_path_factory.mktemp("float"), CONFIGS[request.param]())


@pytest.mark.parametrize("form", FORM_NAMES)
def test_logits_are_those_of_the_dequantized_weights(
    form: str, float_model: Path, tmp_path: Path
) -> None:
    reference = make_quantized(tmp_path, FORMS[form], float_model=float_model)
    _, decoder = load_model(tmp_path, "auto", torch.device("cpu"))
    floats = [names for names, linear in decoder.linears() if linear.weight.numel()]
    assert all(name.endswith(FLOAT_MODULES) for names in floats for name in names)
    prompts = [np.random.default_rng(5).integers(4, VOCAB_SIZE, 19).tolist()]
    check(generate(decoder, prompts, MAX_NEW, CHUNK), expected_answers(reference, prompts, MAX_NEW))
