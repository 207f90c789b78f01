"""Formats of the KV cache: sizes, views, and the error of quantization."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.kv_cache.format import (
    FORMATS,
    KvCacheFormat,
    dequantize,
    format_of,
    num_features,
    quantize,
    to_cache,
)

SCALED = [form for form in FORMATS.values() if form.has_scales]


def max_error(x: Tensor, scale: Tensor, form: KvCacheFormat) -> Tensor:
    """Return the largest possible rounding error of each feature, in float64.

    The bound has two parts: half the distance between two codes, and the errors of two float32
    products. The product of x and the rounded inverse of the scale has a relative error of up to
    2^-22, which may move x across the middle between two codes.
    """
    step = scale.double()[..., None]
    if form.name == "int8":
        return step * 0.5 + x.double().abs() * 2.0**-22
    # FP8 codes have three mantissa bits, so rounding changes a normal value by at most 2^-4 of it.
    # Subnormal codes are 2^-9 apart, so rounding changes a value by at most 2^-10.
    return torch.maximum(x.double().abs() * (2.0**-4 + 2.0**-22), step * 2.0**-10)


def test_a_slot_has_its_features_and_at_most_one_scale() -> None:
    shape = (2, 4, 128)
    found = {name: form.token_bytes(shape) for name, form in FORMATS.items()}
    assert found == {
        "float32": 4096,
        "bfloat16": 2048,
        "float16": 2048,
        "fp8": 1040,
        "int8": 1040,
    }
    assert found["bfloat16"] / found["int8"] == 2 * 128 / 130
    for form in FORMATS.values():
        assert format_of(form.dtype) is form
        assert num_features(torch.zeros(1, form.slot_elements(6)).to(form.dtype)) == 6


@pytest.mark.parametrize("form", SCALED, ids=lambda form: form.name)
def test_an_odd_number_of_features_is_refused(form: KvCacheFormat) -> None:
    with pytest.raises(
        ValueError, match=f"{form.name} needs an even number .*, not 5: set kv_cache_dtype"
    ):
        form.slot_elements(5)


@pytest.mark.parametrize("form", SCALED, ids=lambda form: form.name)
@pytest.mark.parametrize("magnitude", [1e-9, 1e-6, 1e-3, 1.0, 300.0, 1e6])
def test_error_of_quantization_is_at_most_half_a_unit(
    form: KvCacheFormat, magnitude: float
) -> None:
    x = torch.randn(200, 64) * magnitude
    x[7], x[8, 1:] = 0.0, 0.0
    found, scale = quantize(x, form)
    assert not found.float().isnan().any()
    assert (x.abs().amax(1).double() <= scale.double() * form.max_code * (1 + 2**-22)).all()
    exact = found.double() * scale.double()[:, None]
    assert ((exact - x.double()).abs() <= max_error(x, scale, form)).all()


@pytest.mark.parametrize("form", SCALED, ids=lambda form: form.name)
def test_codes_of_a_row_do_not_depend_on_other_rows(form: KvCacheFormat) -> None:
    x = torch.randn(9, 3, 24) * torch.rand(9, 3, 1) * 10
    found, scale = quantize(x, form)
    for row in range(9):
        one, own = quantize(x[row : row + 1], form)
        assert torch.equal(one[0].view(torch.uint8), found[row].view(torch.uint8))
        assert torch.equal(own[0], scale[row])


@pytest.mark.parametrize("form", SCALED, ids=lambda form: form.name)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 3e37])
def test_values_that_have_no_scale_give_no_finite_value(form: KvCacheFormat, bad: float) -> None:
    x = torch.randn(4, 8)
    x[2, 3] = bad
    finite = dequantize(to_cache(x, form)).isfinite()
    assert not finite[2].any()
    assert finite[[0, 1, 3]].all()


@pytest.mark.parametrize("form", SCALED, ids=lambda form: form.name)
def test_views_of_part_of_a_cache_read_whole_pages(form: KvCacheFormat) -> None:
    x = torch.randn(3, 2, 5, 4, 6, 10)
    cache, exact = to_cache(x, form), None
    found, scale = quantize(x, form)
    exact = found.float() * scale.float()[..., None]
    assert torch.equal(dequantize(cache), exact)
    assert torch.equal(dequantize(cache[1:, :, 2:4, 1:3]), exact[1:, :, 2:4, 1:3])
    page = cache[1, 0, 3, 2].clone().view(torch.uint8).flatten()
    assert torch.equal(page[:60], found[1, 0, 3, 2].view(torch.uint8).flatten())
    assert torch.equal(page[60:].view(torch.float16), scale[1, 0, 3, 2])
