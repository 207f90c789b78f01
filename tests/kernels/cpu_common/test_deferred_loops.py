"""Operations use torch while their compiled loops are deferred."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.kernels.activation import op as activation
from penstock.kernels.attention import cpu_plan
from penstock.kernels.attention.op import paged_attention, plan_attention
from penstock.kernels.cpu_common.cpu_features import has_avx2
from penstock.kernels.cpu_common.deferred_loops import defer, finish, is_deferred
from penstock.kernels.cpu_common.numba_runtime import has_numba
from penstock.kernels.kv_cache import op as kv_cache
from penstock.kernels.kv_cache.format import FORMATS, to_cache
from penstock.kernels.linear import cpu_packed_f32
from penstock.kernels.norm import op as norm
from tests.support.batches import make_batch

pytestmark = pytest.mark.skipif(not has_numba(), reason="numba is not installed")


@contextmanager
def deferred(
    monkeypatch: pytest.MonkeyPatch, name: str, module: Any, kernels: str
) -> Iterator[None]:
    """Defer a group in this context, and fail if the function `kernels` of the module is called."""
    defer([name])
    try:
        with monkeypatch.context() as patch:
            patch.setattr(module, kernels, lambda *_: pytest.fail("the loops are deferred"))
            yield
    finally:
        finish(name)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3))


def test_group_is_deferred_until_it_is_finished() -> None:
    defer(["a", "b"])
    finish("a")
    assert (is_deferred("a"), is_deferred("b")) == (False, True)
    finish("b")
    finish("b")
    assert not is_deferred("b")


def test_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = random(5, 96), random(96)
    expected = norm.rms_norm(x, weight, 1e-6)
    with deferred(monkeypatch, norm.LOOPS, norm, "_cpu_kernels"):
        found = norm.rms_norm(x, weight, 1e-6)
        added = norm.fused_add_rms_norm(torch.zeros(5, 96), x, weight, 1e-6)
    torch.testing.assert_close(found, expected)
    assert torch.equal(added, found)


@pytest.mark.parametrize("gate", [activation.silu_and_mul, activation.gelu_tanh_and_mul])
def test_gates(gate: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    x = random(5, 96)
    expected = gate(x)
    with deferred(monkeypatch, activation.LOOPS, activation, "_cpu_kernels"):
        found = gate(x)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rotary_dim", [0, 16])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_rotary_embedding_and_cache(
    name: str, rotary_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = FORMATS[name]
    layers = [to_cache(torch.zeros(2, 3, 2, 8, 32), form) for _ in range(2)]
    slots = torch.tensor([3, 8, 23, 0])
    rows = kv_cache.slot_rows(slots, layers[0].shape)
    heads, angles = random(4, 8, 32), random(4, 2, rotary_dim)
    expected, found = heads.clone(), heads.clone()
    kv_cache.rope_and_cache(expected, 4, angles, rows, layers[0])
    with deferred(monkeypatch, kv_cache.loops_name(form.dtype), kv_cache, "_cpu_kernel"):
        kv_cache.rope_and_cache(found, 4, angles, rows, layers[1])
    torch.testing.assert_close(found[:, :4], expected[:, :4])
    ours, others = (each.view(torch.uint8) for each in layers)
    if name == "int8" or name == "bfloat16":  # a value near the middle may round to either side
        assert (ours != others).float().mean() < 0.01
    else:
        torch.testing.assert_close(layers[1], layers[0])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "fp8"])
def test_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form = FORMATS[name]
    batch, num_blocks = make_batch([(1, 30), (7, 19), (1, 600), (40, 700)], 8, 1)
    layer = to_cache(random(2, num_blocks, 2, 8, 32), form)
    query = random(49, 6, 32)
    expected = paged_attention(query, layer, plan_attention(*batch, layer))
    with deferred(monkeypatch, cpu_plan.loops_name(form.dtype), cpu_plan, "_kernel"):
        found = paged_attention(query, layer, plan_attention(*batch, layer))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_rows", [1, 5, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.skipif(not has_avx2(), reason="needs AVX2")
def test_packed_linear(num_rows: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, bias = random(101, 70), random(101) if has_bias else None
    linear = cpu_packed_f32.pack_f32(weight, bias)
    x = random(num_rows, 70)
    for kernels in ("_simd_kernels", "_amx_kernels"):
        with deferred(monkeypatch, cpu_packed_f32.LOOPS, cpu_packed_f32, kernels):
            found = linear(x)
        torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, bias))
        assert found.is_contiguous()
