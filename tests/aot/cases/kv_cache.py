"""Cases in which `make aot` compiles the kernels of `kernels/kv_cache` ahead of time."""

from collections.abc import Iterator
from functools import partial

import torch

from penstock.kernels.kv_cache.block_copy import gather_blocks, scatter_blocks
from penstock.kernels.kv_cache.checksum import CHUNK, sum_words
from penstock.kernels.kv_cache.format import FORMATS
from penstock.kernels.kv_cache.op import rope_and_cache, write_kv
from tests.aot.case import AotCase, meta


def _write_cases() -> Iterator[AotCase]:
    streams = ("_rope_and_cache_kernel",)
    slots = meta(64, dtype=torch.int64)
    plain = meta(2, 999, 8, 16, 128)
    heads, angles = meta(64, 48, 128), meta(64, 2, 128)
    yield AotCase(
        "32/8 heads of 128",
        lambda: rope_and_cache(heads, 32, angles, slots, plain),
        streams=streams,
    )
    for name in ("fp8", "int8"):
        codes = meta(2, 999, 8, 16, 130, dtype=FORMATS[name].dtype)
        yield AotCase(
            f"32/8 heads of 128, {name}",
            partial(rope_and_cache, heads, 32, angles, slots, codes),
            streams=streams,
        )
    yield AotCase(
        "one of 8/1 heads of 128, 64 turning as neighbours",
        lambda: rope_and_cache(
            meta(64, 10, 128), 8, meta(64, 2, 64), slots, meta(2, 999, 1, 16, 128), True
        ),
        streams=streams,
    )
    yield AotCase(
        "latent rows of 576",
        lambda: write_kv(meta(1, 999, 1, 64, 576), slots, meta(64, 1, 576)),
        streams=streams,
    )


def _block_copy_cases() -> Iterator[AotCase]:
    streams, layers = ("_move_blocks_kernel",), slice(0, 32)
    kv, blocks = meta(32, 2, 999, 8, 16, 128), meta(64, dtype=torch.int64)
    yield AotCase(
        "gather 4 of 8 heads",
        lambda: gather_blocks(kv, blocks, layers, slice(4, 8)),
        streams=streams,
    )
    staged = meta(32, 2, 64, 4, 16, 128)
    yield AotCase(
        "scatter 4 of 8 heads",
        lambda: scatter_blocks(kv, blocks, layers, slice(4, 8), staged),
        streams=streams,
    )


def _checksum_cases() -> Iterator[AotCase]:
    words, weights, chunk_weights = (
        meta(size, dtype=torch.int64) for size in (1 << 20, CHUNK + 1, 1 << 12)
    )
    yield AotCase(
        "8 MiB",
        lambda: sum_words(words, weights, chunk_weights),
        streams=("_sum_words_kernel",),
    )


def aot_cases() -> Iterator[AotCase]:
    yield from _write_cases()
    yield from _block_copy_cases()
    yield from _checksum_cases()
