"""Fused linear layers, such as q, k and v, and the views of their weights and biases."""

import torch

from penstock.workers.layers.linear import empty_linear


def test_parts_are_views_of_one_fused_layer() -> None:
    linear = empty_linear(5, (3, 2, 4), True, torch.float32, torch.device("cpu"))
    assert linear.weight.is_meta
    parts = {name: each.data() for name, each in linear.parameters(["q", "k", "v"]).items()}
    assert list(parts) == ["q.weight", "k.weight", "v.weight", "q.bias", "k.bias", "v.bias"]
    for part in parts.values():
        part.copy_(torch.randn(part.shape))
    x = torch.randn(6, 5)
    expected = [x @ parts[f"{name}.weight"].T + parts[f"{name}.bias"] for name in "qkv"]
    torch.testing.assert_close(linear(x), torch.cat(expected, -1))


def test_layer_without_a_bias() -> None:
    linear = empty_linear(5, (3,), False, torch.float32, torch.device("cpu"))
    assert linear.bias is None
    assert [each.shape for each in linear.parameters(["o"]).values()] == [(3, 5)]


def test_rows_are_reordered_with_their_biases() -> None:
    linear = empty_linear(2, (2, 1), True, torch.float32, torch.device("cpu"))
    for each in linear.parameters(["qkv"]).values():
        data = each.data()
        data.copy_(torch.arange(data.numel()).view(data.shape))
    linear.row_order = torch.tensor([2, 0, 1])
    linear.reorder_rows()
    assert linear.weight.tolist() == [[4, 5], [0, 1], [2, 3]]
    assert linear.bias is not None
    assert linear.bias.tolist() == [2, 0, 1]
    assert linear.row_order is None
