"""Compares norms, rotary embeddings and gated activations with their references."""

import math
from collections.abc import Callable

import pytest
import torch

from penstock.kernels.activation.op import (
    gelu,
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_reference,
    sigmoid,
    silu_and_mul,
    silu_and_mul_batch_invariant,
    silu_and_mul_reference,
    swiglu_oai,
)
from penstock.kernels.norm import op as norm
from penstock.kernels.norm.op import (
    fused_add_rms_norm,
    gemma_rms_norm,
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from penstock.kernels.rope.op import rotary_table, rotate_, rotate_reference
from tests.support.threads import threads


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 3, 24) * 9, torch.randn(24)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))
    zero = torch.zeros(1, 24)
    assert torch.equal(rms_norm(zero, weight, 1e-5), zero)


@pytest.mark.parametrize("numba", [True, False])
@pytest.mark.parametrize("width", [1, 15, 64, 100, 768])
def test_fused_add_rms_norm(width: int, numba: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "has_numba", lambda: numba)
    hidden, x, weight = torch.randn(70, width) * 9, torch.randn(70, width), torch.randn(width)
    x[3, 0], x[5, -1] = torch.nan, torch.inf
    expected = hidden + x
    found = fused_add_rms_norm(hidden, x, weight, 1e-5)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=0, equal_nan=True)
    finite_rows = [row for row in range(70) if row not in (3, 5)]
    reference = rms_norm_reference(expected, weight, 1e-5)
    torch.testing.assert_close(found[finite_rows], reference[finite_rows])
    assert found[3].isnan().all()
    assert not found[5].isfinite()[-1]


def test_rms_norm_of_a_strided_view_has_the_same_bits() -> None:
    x, weight = torch.randn(9, 2, 100), torch.randn(100)
    whole = rms_norm(x[:, 0].clone(), weight, 1e-5)
    assert torch.equal(rms_norm(x[:, 0], weight, 1e-5), whole)
    assert torch.equal(rms_norm(x[3:4, 0], weight, 1e-5), whole[3:4])


def test_layer_norm() -> None:
    x, weight, bias = torch.randn(5, 3, 24) * 9 + 4, torch.randn(24), torch.randn(24)
    expected = layer_norm_reference(x, weight, bias, 1e-5)
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5), expected)


def test_silu_and_mul() -> None:
    gate_up = torch.randn(7, 22) * 4
    expected = silu_and_mul_reference(gate_up)
    torch.testing.assert_close(silu_and_mul_batch_invariant(gate_up), expected)
    torch.testing.assert_close(silu_and_mul(gate_up), expected)


@pytest.mark.parametrize("gate", [silu_and_mul, gelu_tanh_and_mul])
def test_gates_of_an_odd_number_of_columns_are_refused(
    gate: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with pytest.raises(RuntimeError, match="size"):
        gate(torch.randn(3, 7))


def test_gelu_and_mul() -> None:
    gate_up = torch.randn(7, 22) * 4
    torch.testing.assert_close(gelu_tanh_and_mul(gate_up), gelu_tanh_and_mul_reference(gate_up))


def test_swiglu_oai_clamps() -> None:
    gate_up = torch.tensor([[9.0, 0.5, -1.0, 8.0, 2.0, -9.0]])
    found = swiglu_oai(gate_up, 1.5, 7.0)
    clamped_pairs = [(7.0, 0.5), (-1.0, 7.0), (2.0, -7.0)]
    expected = [(up + 1) * gate / (1 + math.exp(-1.5 * gate)) for gate, up in clamped_pairs]
    torch.testing.assert_close(found, torch.tensor([expected]))


def test_activations_of_large_inputs_saturate() -> None:
    x = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4])
    assert sigmoid(x).tolist() == [0, 0, 0.5, 1, 1]
    assert gelu(x).tolist() == [0, 0, 0, 100, 1e4]
    assert silu_and_mul_batch_invariant(torch.cat((x, torch.ones(5)))[None]).tolist() == [
        [0, 0, 0, 100, 1e4]
    ]


WIDTH = 2050  # not a multiple of a vector length
WEIGHT = torch.randn(WIDTH)
ROWWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu_mul": silu_and_mul_batch_invariant,
    "gelu_mul": gelu_tanh_and_mul,
    "gelu": gelu,
    "erf": torch.nn.functional.gelu,
    "sigmoid": sigmoid,
    "clamped": lambda x: swiglu_oai(x, 1.7, 7.0),
    "rms_norm": lambda x: rms_norm(x, WEIGHT, 1e-5),
    "rms_norm_above_one": lambda x: gemma_rms_norm(x, WEIGHT, 1e-5),
    "layer_norm": lambda x: layer_norm(x, WEIGHT, WEIGHT, 1e-5),
    "log_softmax": lambda x: x.log_softmax(-1),
    "tanh": torch.tanh,
}


@pytest.mark.parametrize("name", ROWWISE)
def test_row_bits_do_not_depend_on_batch_or_threads(name: str) -> None:
    x = torch.randn(67, WIDTH)
    whole = ROWWISE[name](x.clone())
    for count in (1, 2, 3):
        with threads(count):
            for first, rows in ((0, 67), (3, 1), (5, 2), (9, 31), (2, 64)):
                found = ROWWISE[name](x[first : first + rows].clone())
                assert torch.equal(found, whole[first : first + rows])


def test_gemma_rms_norm_adds_one_in_float32() -> None:
    x, weight = torch.randn(5, 24) * 9, torch.randn(24)
    expected = rms_norm_reference(x, 1 + weight, 1e-5)
    torch.testing.assert_close(gemma_rms_norm(x, weight, 1e-5), expected)
    tiny = torch.full((24,), 2.0**-12, dtype=torch.bfloat16)  # 1 + tiny rounds to 1 in bfloat16
    rows = torch.randn(500, 24).to(torch.bfloat16)
    found, plain = gemma_rms_norm(rows, tiny, 1e-5), rms_norm(rows, 1 + tiny, 1e-5)
    assert not torch.equal(found, plain)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_of_a_view_in_place(interleaved: bool) -> None:
    frequencies = torch.rand(6)
    table = rotary_table(frequencies, 300, torch.float32, interleaved=interleaved)
    positions = torch.tensor([0, 299, 17, 17])
    fused = torch.randn(4, 5, 12)
    expected = fused.clone()
    expected[:, 1:4] = rotate_reference(fused[:, 1:4], positions, frequencies, interleaved)
    rotate_(fused[:, 1:4], table[positions], interleaved)
    # A float32 angle near 300 is rounded by up to 2^-16; the reference uses float64.
    torch.testing.assert_close(fused, expected, rtol=0, atol=2.0**-16 * 5)


def test_rotated_products_depend_on_the_distance_only() -> None:
    table = rotary_table(torch.rand(6), 64, torch.float32)
    query, key = torch.randn(1, 1, 12), torch.randn(1, 1, 12)

    def product(at: int, other: int) -> torch.Tensor:
        q, k = query.clone(), key.clone()
        rotate_(q, table[[at]])
        rotate_(k, table[[other]])
        return (q * k).sum()

    torch.testing.assert_close(product(3, 11), product(50, 58), rtol=1e-4, atol=1e-4)
