"""Fused linear layers, such as q, k and v, and the views of their weights and biases."""

import torch

from penstock.workers.layers.linear import empty_linear


def test_parts_are_views_of_one_fused_layer() -> None:
    linear = empty_linear(5, (3, 2, 4), True, torch.float32, torch.device("cpu"))
    parts = linear.tensors(["q", "k", "v"])
    assert list(parts) == ["q.weight", "k.weight", "v.weight", "q.bias", "k.bias", "v.bias"]
    for part in parts.values():
        part.copy_(torch.randn(part.shape))
    x = torch.randn(6, 5)
    expected = [x @ parts[f"{name}.weight"].T + parts[f"{name}.bias"] for name in "qkv"]
    torch.testing.assert_close(linear(x), torch.cat(expected, -1))


def test_layer_without_a_bias() -> None:
    linear = empty_linear(5, (3,), False, torch.float32, torch.device("cpu"))
    assert linear.bias is None
    assert [tuple(part.shape) for part in linear.tensors(["o"]).values()] == [(3, 5)]
