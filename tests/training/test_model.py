"""The trained module equals the Llama of `transformers` in weights and logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from training import checkpoint
from training.model import Llama, LlamaShape
from training.muon import orthogonal

SHAPE = LlamaShape(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=96,
    vocab_size=300,
)


def random_model() -> Llama:
    """Return a model with random weights, because a new model may have zeros."""
    torch.manual_seed(1)
    model = Llama(SHAPE)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model


@torch.no_grad()
def test_logits_equal_those_of_transformers(tmp_path: Path) -> None:
    model = random_model()
    checkpoint.save(model, tmp_path)
    tokens = torch.randint(SHAPE.vocab_size, (2, 40))
    mask = torch.ones(2, 1, 40, 40, dtype=torch.bool).tril()
    actual = model.logits(model(tokens, mask))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path)(tokens).logits
    assert torch.allclose(actual, expected, atol=2e-4)
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


def test_save_and_load_keep_the_weights(tmp_path: Path) -> None:
    model = random_model()
    checkpoint.save(model, tmp_path)
    loaded = checkpoint.load(tmp_path)
    assert loaded.shape == SHAPE
    for (name, weight), other in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(weight, other), name


@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (16, 16)])
def test_muon_brings_all_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape)))
    assert values.min() > 0.3
    assert values.max() < 1.4
