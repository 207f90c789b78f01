"""The Triton kernel that writes keys and values to the KV cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.kv_cache.format import FORMATS, codes, dequantize, format_of, scales
from penstock.kernels.kv_cache.op import rope_and_cache, slot_rows, write_kv, write_kv_reference
from penstock.kernels.rope.op import rotary_table, rotate_reference
from tests.support.devices import DTYPES
from tests.support.kernels import close, poisoned

pytestmark = pytest.mark.interpreted

E4M3 = torch.float8_e4m3fn


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that two tensors have the same dtype and are bitwise identical, including NaN."""
    assert found.dtype == expected.dtype
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@settings(max_examples=12)
@given(
    st.integers(0, 9),
    st.sampled_from([(2, 1, 1, 8), (2, 3, 4, 5), (2, 8, 16, 64), (1, 1, 16, 72)]),
    st.sampled_from(DTYPES),
)
def test_write_kv_changes_only_the_given_slots(
    num_tokens: int, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    num_sides, num_heads, block_size, dim = shape
    layer = poisoned(num_sides, 12, num_heads, block_size, dim, dtype=dtype)
    expected = layer.clone()
    slots = torch.randperm(12 * block_size)[:num_tokens]
    fused = torch.randn(len(slots), 4 + num_sides * num_heads, dim).to(dtype)
    write_kv(layer, slot_rows(slots, layer.shape), fused[:, 4:])
    write_kv_reference(expected, slots, fused[:, 4:])
    assert_same_bits(layer, expected)


@settings(max_examples=18)
@given(
    st.integers(1, 9),
    st.sampled_from([(4, 2, 16, 16), (3, 1, 24, 8), (8, 8, 64, 64), (5, 5, 10, 6)]),
    st.booleans(),
    st.sampled_from([None, "fp8", "int8"]),
    st.sampled_from(DTYPES),
)
def test_rope_and_cache_rotates_and_writes(
    num_tokens: int,
    shape: tuple[int, int, int, int],
    interleaved: bool,
    name: str | None,
    dtype: torch.dtype,
) -> None:
    num_heads, num_kv_heads, dim, rotary_dim = shape
    form = format_of(dtype) if name is None else FORMATS[name]
    frequencies, positions = torch.rand(rotary_dim // 2), torch.randint(0, 50, (num_tokens,))
    table = rotary_table(frequencies, 50, torch.float32, interleaved=interleaved)
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, dim).to(dtype)
    wide = heads.double()
    rotated = wide[:, : num_heads + num_kv_heads, :rotary_dim]
    rotated.copy_(rotate_reference(rotated, positions, frequencies, interleaved))
    slots = torch.randperm(7 * 4)[:num_tokens]
    layer = torch.zeros(2, 7, num_kv_heads, 4, form.slot_elements(dim)).to(form.dtype)
    rows = slot_rows(slots, layer.shape)
    rope_and_cache(heads, num_heads, table[positions], rows, layer, interleaved)
    close(heads[:, :num_heads], wide[:, :num_heads], 50.0 if dtype == torch.float32 else 1.0)
    expected = torch.zeros(2, 7, num_kv_heads, 4, dim, dtype=torch.float64)
    write_kv_reference(expected, slots, wide[:, num_heads:])
    if not form.has_scales:
        close(layer, expected, 50.0 if dtype == torch.float32 else 1.0)
        return
    # The bound is half a unit of a code, as derived in `kv_cache/format.quantize`.
    scale = scales(layer).double()[..., None]
    half = scale / 2 if name == "int8" else torch.maximum(expected.abs() / 16, scale * 2.0**-10)
    assert ((dequantize(layer, torch.float64) - expected).abs() <= half * 1.01).all()


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e-4, 1.0, 300.0, 1e6])
def test_codes_and_scales_have_the_bits_of_the_reference(name: str, magnitude: float) -> None:
    new = torch.randn(16, 6, 24) * magnitude
    new[1, 1], new[2, 2, 3], new[3, 3, 2], new[4, 4] = 0.0, torch.nan, torch.inf, 1e-44
    new[5] *= torch.rand(6, 1)
    # These values are halfway between two codes.
    new[6] = torch.round(new[6] / magnitude * 4) * magnitude
    layer = torch.zeros(2, 5, 3, 4, 26, dtype=torch.int8).view(FORMATS[name].dtype)
    expected, slots = layer.clone(), torch.randperm(20)[:16]
    write_kv(layer, slots, new)
    write_kv_reference(expected, slots, new)
    assert_same_bits(layer, expected)


def test_fp8_codes_are_rounded_to_nearest() -> None:
    """Each row contains 448, so its scale is 1, and its codes are the values rounded to float8."""
    halves = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.float16).float()
    values = torch.cat((halves, halves * 2.0**-7)).nan_to_num(0.0, 0.0, 0.0).clamp(-448, 448)
    heads = torch.cat((values.view(512, 2, -1), torch.full((512, 2, 2), 448.0)), 2)
    form = FORMATS["fp8"]
    layer = torch.zeros(2, 128, 1, 4, form.slot_elements(heads.shape[2])).to(form.dtype)
    slots = torch.arange(512)
    write_kv(layer, slots, heads)
    assert (scales(layer) == 1).all()
    found = codes(layer).transpose(0, 1).permute(0, 3, 1, 2, 4).reshape(512, 2, -1)
    assert_same_bits(found.contiguous(), heads.to(form.dtype))


def test_slots_outside_the_layer_are_not_written() -> None:
    memory = poisoned(3, 2, 4, 2, 4, 8)
    layer = memory[1]  # a write outside of `layer` changes memory[0] or memory[2]
    untouched = memory.clone()
    heads = torch.randn(3, 4, 8)
    write_kv(layer, torch.tensor([-1, 16, 1 << 40]), heads)
    assert_same_bits(memory, untouched)
    angles = rotary_table(torch.rand(4), 3, torch.float32)
    heads = torch.randn(3, 6, 8)
    rope_and_cache(heads, 2, angles, torch.tensor([-1, 3, 99]), layer)
    untouched[1, :, 0, :, 3] = layer[:, 0, :, 3]
    assert_same_bits(memory, untouched)
    assert not layer[:, 0, :, 3].isnan().any()


def test_bits_of_a_token_do_not_depend_on_the_batch() -> None:
    angles = rotary_table(torch.rand(16), 20, torch.float32)
    heads = torch.randn(20, 6, 32)
    slots = torch.randperm(24)[:20]
    batched, single = torch.zeros(2, 6, 2, 4, 32), torch.zeros(2, 6, 2, 4, 32)
    whole, one = heads.clone(), heads[11:12].clone()
    rope_and_cache(whole, 2, angles, slots, batched)
    rope_and_cache(one, 2, angles[11:12], slots[11:12], single)
    block, offset = divmod(int(slots[11]), 4)
    assert torch.equal(single[:, block, :, offset], batched[:, block, :, offset])
    assert torch.equal(one[0, :2], whole[11, :2])


def test_invalid_arguments_are_refused() -> None:
    layer, heads = torch.zeros(2, 3, 2, 4, 8), torch.randn(5, 6, 8)
    slots, angles = torch.arange(5), rotary_table(torch.rand(4), 5, torch.float32)
    with pytest.raises(ValueError, match=r"heads has shape \[5, 6, 8\]: expected \[T, 7, 8\]"):
        rope_and_cache(heads, 3, angles, slots, layer)
    with pytest.raises(ValueError, match=r"rows has shape \[4\]: expected \[5\]"):
        rope_and_cache(heads, 2, angles, slots[:4], layer)
    with pytest.raises(ValueError, match="rows has dtype int32: expected int64"):
        rope_and_cache(heads, 2, angles, slots.int(), layer)
    with pytest.raises(
        ValueError, match="cos_sin has 16 features: expected an even number from 2 to 8"
    ):
        rope_and_cache(heads, 2, torch.zeros(5, 2, 16), slots, layer)
    with pytest.raises(ValueError, match="layer has dtype float16: expected float32"):
        rope_and_cache(heads, 2, angles, slots, layer.half())
    with pytest.raises(ValueError, match=r"layer has strides .*: expected a contiguous tensor"):
        rope_and_cache(heads, 2, angles, slots, layer.transpose(1, 3))
    with pytest.raises(ValueError, match=r"heads has shape \[5, 6, 8\]: expected \[T, 6, 6\]"):
        rope_and_cache(heads, 2, angles, slots, layer.to(E4M3))
