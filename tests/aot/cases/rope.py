"""Cases in which `make aot` compiles the kernels of `kernels/rope` ahead of time."""

from collections.abc import Iterator

from penstock.kernels.rope.op import rotate_
from tests.aot.case import AotCase, meta


def aot_cases() -> Iterator[AotCase]:
    streams = ("_rotate_kernel",)
    heads, angles = meta(64, 128, 192)[:, :, 128:], meta(64, 2, 64)
    yield AotCase("latent queries, halves", lambda: rotate_(heads, angles), streams=streams)
    yield AotCase("latent queries, pairs", lambda: rotate_(heads, angles, True), streams=streams)
