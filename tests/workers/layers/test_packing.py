"""Packing: the right linear layers of a model are packed, and their results stay the same."""

from pathlib import Path

import pytest
import torch

from penstock.kernels.linear.cpu_packed_f32 import PackedLinearF32
from penstock.workers.layers import packing
from penstock.workers.layers.mla import LatentAttention
from penstock.workers.layers.packing import linears, pack
from penstock.workers.models.decoder import Decoder
from penstock.workers.weights.loading import load_model
from tests.support.checkpoints import make_checkpoint
from tests.support.tiny import tiny_checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def decoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    monkeypatch.setattr(packing, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(packing, "MEMORY_FRACTION", 0)
    monkeypatch.setattr(packing, "supports_packed_f32", lambda weight: False)
    return load_model(tiny_checkpoint(tmp_path), "auto", CPU)[1]


def test_every_linear_layer_is_found(decoder: Decoder) -> None:
    found = list(linears(decoder))
    assert len(found) == 4 * len(decoder.layers) + 1
    # With a MEMORY_FRACTION of 0, no layer is packed.
    assert not any(linear.packed for linear in found)


def test_onednn_packing_keeps_the_results(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(5, 32)
    before = [linear(x) for linear in linears(decoder) if linear.weight.shape[1] == 32]
    monkeypatch.setattr(packing, "MEMORY_FRACTION", 0.5)
    pack(decoder, "none")
    after = [linear(x) for linear in linears(decoder) if linear.weight.shape[1] == 32]
    assert all(linear.packed for linear in linears(decoder))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def test_f32_panel_packing_keeps_the_results_but_no_plain_weights(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(5, 32)
    before = [linear(x) for linear in linears(decoder) if linear.weight.shape[1] == 32]
    monkeypatch.setattr(packing, "supports_packed_f32", lambda weight: True)
    pack(decoder, "none")
    after = [linear(x) for linear in linears(decoder) if linear.weight.shape[1] == 32]
    assert all(isinstance(linear.packed, PackedLinearF32) for linear in linears(decoder))
    assert all(linear.weight.numel() == 0 for linear in linears(decoder))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)


def test_int8_packing_frees_all_plain_weights_except_the_embeddings(decoder: Decoder) -> None:
    pack(decoder, "int8")
    assert all(linear.weight.numel() == 0 for linear in linears(decoder))
    assert decoder.embeddings is not None
    assert decoder.embeddings.numel() > 0


def test_up_projection_of_mla_stays_a_matrix_in_int8(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "deepseek-v2-lite")
    decoder = load_model(tmp_path, "auto", CPU, quantization="int8")[1]
    for layer in decoder.layers:
        assert isinstance(layer.attention, LatentAttention)
        assert layer.attention.up not in list(linears(layer))
        assert layer.attention.up.packed is None
        assert len(layer.attention.up_heads) == layer.attention.num_heads


def test_moe_router_is_not_packed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mixtral")
    decoder = load_model(tmp_path, "auto", CPU)[1]
    [moe, *_] = [layer.mlp for layer in decoder.layers]
    assert moe.router not in list(linears(moe))  # type: ignore[union-attr]
    assert len(list(linears(moe))) == 2 * len(moe.experts)  # type: ignore[union-attr]


def test_int8_is_refused_for_bfloat16(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"int8 is not available: .*float32"):
        load_model(tiny_checkpoint(tmp_path), "bfloat16", CPU, quantization="int8")
