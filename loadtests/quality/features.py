"""Error of a large matmul for each form, on random weights and random features.

The bundled model, with 2.9 million parameters, has matmuls of at most 512 inputs. Real models have
thousands of inputs, some of them outliers. The weights are samples of Student's t distribution with
5 degrees of freedom. The features are those of a random layer with ReLU: normal inputs are
multiplied by a random matrix of low rank. Some features are ten times as large as the others.

Each weight lies within half a step of its quantization level. If the errors were independent and
uniform, the output's error would have the standard deviation sqrt(sum of x² h² / 3), with half
steps h. The root mean square of these deviations over all outputs is the `bound` of the form.
Calibration helps if it makes the error a smaller fraction of the bound than plain rounding does.
Quantized activations add the same sum with x and weights exchanged.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.linear.code_kinds import FP8_GROUP_INPUTS
from penstock.kernels.linear.quantize_weights import WeightForm, quantize_weight
from penstock.kernels.linear.w8a8 import Form, dequantize, quantize_activations_reference
from penstock.loadtests.quality.rounding import (
    GROUP,
    Rounded,
    clipped,
    gptq,
    mxfp4,
    nf4,
    nvfp4,
    q4_k,
    q6_k,
)

NUM_OUTPUTS, NUM_INPUTS, NUM_ROWS, RANK = 512, 2048, 1024, 256


@dataclass(frozen=True, slots=True)
class ProductError:
    """Root mean square error of a product's outputs.

    Attributes:
        relative: the error divided by the root mean square of the outputs.
        of_bound: the error divided by the form's `bound` (see the module docstring).
    """

    relative: float
    of_bound: float


def random_features(generator: torch.Generator) -> Tensor:
    """Return features [2 * NUM_ROWS, NUM_INPUTS] float64."""
    inner = torch.randn(2 * NUM_ROWS, RANK, generator=generator, dtype=torch.float64)
    mixed = inner @ torch.randn(RANK, NUM_INPUTS, generator=generator, dtype=torch.float64)
    sizes = torch.ones(NUM_INPUTS, dtype=torch.float64)
    sizes[torch.randperm(NUM_INPUTS, generator=generator)[: NUM_INPUTS // 100]] = 10
    return mixed.relu() * sizes


def online(form: WeightForm) -> Callable[[Tensor, Tensor], Rounded]:
    def round_weight(weight: Tensor, hessian: Tensor) -> Rounded:
        matrix = quantize_weight(weight, form)
        found = matrix.dequantize()
        half = _half_steps(found, matrix.scales[:, matrix.groups.long()], form)
        return Rounded(found, half, matrix.codes, matrix.scales, matrix.zeros)

    return round_weight


def _half_steps(values: Tensor, scales: Tensor, form: str) -> Tensor:
    """Return half the distance between the two quantization levels around each value."""
    if form == "fp8":  # 3 mantissa bits: e4m3 values between 2^n and 2^(n+1) are 2^(n-3) apart
        return torch.maximum(values.abs().log2().floor().exp2() * 2**-4, scales * 2**-10)
    return scales / 2


FORMS: dict[str, Callable[[Tensor, Tensor], Rounded]] = {
    "int8": online("int8"),
    "fp8": online("fp8"),
    "int4": online("int4"),
    "GPTQ": gptq,
    "AWQ": lambda weight, hessian: clipped(weight, hessian.diagonal()),
    "Q4_K": lambda weight, hessian: q4_k(weight),
    "Q6_K": lambda weight, hessian: q6_k(weight),
    "NF4": lambda weight, hessian: nf4(weight),
    "W8A16": online("int8"),
    "MXFP4": lambda weight, hessian: mxfp4(weight),
    "NVFP4": lambda weight, hessian: nvfp4(weight),
}
"""Functions that quantize weights [N, K], given the mean of x xᵀ [K, K], by name of the form.

The function of AWQ only clips the ranges; it does not scale the inputs.
"""


W8A8: dict[str, tuple[Form, int]] = {
    "int8, INT8 activations": ("int8", NUM_INPUTS),
    "fp8, FP8 activations": ("fp8", NUM_INPUTS),
    "fp8, FP8 activations in groups of 128": ("fp8", FP8_GROUP_INPUTS),
}
"""Form and group size of quantized activations; the weights have the same form."""


def product_errors(seed: int = 0) -> dict[str, ProductError]:
    """Return the error of each form. Calibration and measurement use different features."""
    assert NUM_INPUTS % GROUP == 0
    generator = torch.Generator().manual_seed(seed)
    features = random_features(generator)
    seen, x = features[:NUM_ROWS], features[NUM_ROWS:]
    hessian = seen.T @ seen / len(seen)
    normal = torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=generator)
    squares = torch.randn(5, NUM_OUTPUTS, NUM_INPUTS, generator=generator).square().mean(0)
    weight = normal / squares.sqrt()
    exact = x @ weight.double().T
    found = {}
    for name, round_weight in FORMS.items():
        rounded = round_weight(weight, hessian)
        error = _rms(x @ (rounded.weight - weight).double().T)
        bound = ((x.square() @ rounded.half_steps.double().square().T) / 3).mean().sqrt()
        found[name] = ProductError(error / _rms(exact), error / float(bound))
        for both, (form, size) in W8A8.items():
            if form == name:
                found[both] = _with_rounded_inputs(x, form, size, exact, rounded, bound)
    return found


def _with_rounded_inputs(
    x: Tensor, form: Form, size: int, exact: Tensor, weights: Rounded, weights_bound: Tensor
) -> ProductError:
    """Return the error if x is quantized too, in groups of `size` inputs."""
    codes, scales = quantize_activations_reference(x, form, size)
    near, weight = dequantize(codes, scales), weights.weight.double()
    steps = _half_steps(near, scales.double().repeat_interleave(size, 1), form)
    bound = (weights_bound.square() + (steps.square() @ weight.square().T).mean() / 3).sqrt()
    error = _rms(near @ weight.T - exact)
    return ProductError(error / _rms(exact), error / float(bound))


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
