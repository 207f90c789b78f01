"""Cases in which `make aot` compiles the kernels of `kernels/activation` ahead of time."""

from collections.abc import Iterator

from penstock.kernels.activation.op import (
    gelu_tanh_and_mul,
    silu_and_mul,
    swiglu_oai,
)
from tests.aot.case import AotCase, meta


def aot_cases() -> Iterator[AotCase]:
    streams = ("_gated_kernel",)
    yield AotCase("silu 14336", lambda: silu_and_mul(meta(64, 2 * 14336)), streams=streams)
    yield AotCase("gelu 9216", lambda: gelu_tanh_and_mul(meta(64, 2 * 9216)), streams=streams)
    yield AotCase(
        "clamped silu 2880", lambda: swiglu_oai(meta(64, 5760), 1.702, 7.0), streams=streams
    )
