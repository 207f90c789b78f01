"""Cases in which `make aot` compiles the kernels of `kernels/norm` ahead of time."""

from collections.abc import Iterator

from penstock.kernels.norm.op import (
    fused_add_gemma_rms_norm,
    fused_add_layer_norm,
    fused_add_rms_norm,
    rms_norm,
    rms_norm_,
)
from tests.aot.case import AotCase, meta


def aot_cases() -> Iterator[AotCase]:
    streams = ("_norm_kernel",)
    weight = meta(4096)
    yield AotCase("rms 4096", lambda: rms_norm(meta(64, 4096), weight, 1e-5), streams=streams)
    yield AotCase(
        "add and rms 4096",
        lambda: fused_add_rms_norm(meta(64, 4096), meta(64, 4096), weight, 1e-5),
        streams=streams,
    )
    yield AotCase(
        "add and rms above one 3584",
        lambda: fused_add_gemma_rms_norm(meta(64, 3584), meta(64, 3584), meta(3584), 1e-6),
        streams=streams,
    )
    yield AotCase(
        "add and layer 8192",
        lambda: fused_add_layer_norm(meta(64, 8192), meta(64, 8192), meta(8192), meta(8192), 1e-5),
        streams=streams,
    )
    yield AotCase(
        "heads 128, in place",
        lambda: rms_norm_(meta(64, 48, 128)[:, :32], meta(128), 1e-6),
        streams=streams,
    )
