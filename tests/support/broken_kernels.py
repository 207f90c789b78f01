"""Kernels that each break one rule of `tests.aot`, with their cases."""

import os
from collections.abc import Iterator

import torch

from penstock.kernels.triton_common.launch import jit, launch, tl
from tests.aot.case import GFX942, SM_90, AotCase, meta


@jit
def _hoarder(x, out, SIZE: tl.constexpr):
    """Add a vector [SIZE] and its reverse in one program; this needs too many registers."""
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at) + tl.load(x + SIZE - 1 - at))


@jit
def _multiplier(x, y, out, SIZE: tl.constexpr):
    """Multiply two row-major matrices [SIZE, SIZE] in one program."""
    at = tl.arange(0, SIZE)
    places = at[:, None] * SIZE + at[None, :]
    made = tl.dot(tl.load(x + places), tl.load(y + places), input_precision="ieee")
    tl.store(out + places, made)


@jit
def _copier(x, out, step, SIZE: tl.constexpr):
    """Copy every `step`-th element of `x` to `out`; one program per SIZE elements."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(out + at, tl.load(x + at * step))


@jit
def _nonsense(x):
    """Call a method that does not exist, so that compilation fails."""
    tl.store(x, tl.load(x).no_such_thing())


@jit
def _outsider(x):
    """Store one zero per program; no AOT case launches this kernel."""
    tl.store(x + tl.program_id(0), 0.0)


def _multiply(dtype: torch.dtype) -> None:
    x, out = meta(32, 32, dtype=dtype), meta(32, 32, dtype=torch.float32)
    launch(_multiplier, (1,), x, x, out, SIZE=32, num_warps=4)


def _copy(step: int) -> None:
    launch(_copier, (1,), meta(1 << 16), meta(1 << 14), step, SIZE=2048, num_warps=4)


def _hoard(num_warps: int) -> None:
    x = meta(1 << 14, dtype=torch.float32)
    launch(_hoarder, (1,), x, x, SIZE=1 << 14, num_warps=num_warps)


def aot_cases() -> Iterator[AotCase]:
    both, products, streams = (SM_90, GFX942), ("_multiplier",), ("_copier",)
    yield AotCase("spills", lambda: _hoard(1), chips=(SM_90,))
    yield AotCase("hoards no more", lambda: _hoard(32), chips=(SM_90,))
    yield AotCase("no tensor cores", lambda: _multiply(torch.float32), products, (), (SM_90,))
    yield AotCase("tensor cores", lambda: _multiply(torch.float16), products, (), both)
    yield AotCase("narrow reads", lambda: _copy(3), (), streams, both)
    yield AotCase("wide reads", lambda: _copy(1), (), streams, both)
    yield AotCase("does not compile", lambda: launch(_nonsense, (1,), meta(1)), chips=(SM_90,))
    yield AotCase("absent", lambda: _copy(1), ("_multiplier",), (), (SM_90,))
    yield AotCase("dies", lambda: os._exit(3), chips=(SM_90,))
