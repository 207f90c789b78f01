"""Compares frequencies and scale of every kind of RoPE with transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from penstock.workers.models.config import Fields
from penstock.workers.models.rope_config import read_rope
from penstock.workers.models.rotary_embedding import make_rotary
from tests.support.checkpoints import LLAMA3_ROPE, LONG_ROPE, YARN_ROPE

CPU = torch.device("cpu")
HEAD_DIM = 12
MAX_LEN = 192

KINDS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3_ROPE,
    "yarn": YARN_ROPE,
    "yarn-untruncated": YARN_ROPE | {"truncate": False, "beta_fast": 8, "beta_slow": 2},
    "yarn-deepseek": YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-attention-factor": YARN_ROPE | {"attention_factor": 1.7},
    "longrope": LONG_ROPE | {"original_max_position_embeddings": 48, "partial_rotary_factor": 0.67},
}


@pytest.mark.parametrize("name", KINDS)
def test_frequencies_and_scale_match_transformers(name: str) -> None:
    parameters = {"rope_theta": 700.0} | KINDS[name]
    config = transformers.LlamaConfig(
        num_attention_heads=4,
        hidden_size=4 * HEAD_DIM,
        max_position_embeddings=MAX_LEN,
        rope_parameters=dict(parameters),
    )
    make = ROPE_INIT_FUNCTIONS[parameters["rope_type"]]
    frequencies, scale = make(config, CPU, seq_len=MAX_LEN)
    values = {"rope_parameters": parameters, "max_position_embeddings": MAX_LEN}
    found = make_rotary(read_rope(Fields(values, Path("config.json")), True), HEAD_DIM, CPU)
    torch.testing.assert_close(found.frequencies, frequencies)
    assert found.scale == pytest.approx(scale)
