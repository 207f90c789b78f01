"""Cases in which `make aot` compiles the kernels of `kernels/sampling` ahead of time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.kernels.sampling.logprobs import logprobs
from penstock.kernels.sampling.op import SamplingTensors, sample
from penstock.kernels.sampling.penalties import Penalties, add_logit_bias_, apply_penalties_
from penstock.kernels.sampling.token_mask import apply_token_mask_
from tests.aot.case import AotCase, meta


def _sample_cases() -> Iterator[AotCase]:
    def case(num_rows: int, vocab_size: int) -> tuple[Tensor, Tensor]:
        floats = [meta(num_rows, dtype=torch.float32) for _ in range(4)]
        whole = [meta(num_rows, dtype=torch.int64) for _ in range(4)]
        return sample(
            meta(num_rows, vocab_size, dtype=torch.float32), SamplingTensors(*floats, *whole)
        )

    yield AotCase(
        "64 rows, 151936 tokens",
        lambda: case(64, 151936),
        streams=("_scan_kernel", "_sample_kernel"),
    )


def _logprobs_cases() -> Iterator[AotCase]:
    logits = meta(16, 128256, dtype=torch.float32)
    tokens = meta(16, dtype=torch.int64)
    yield AotCase("the 20 likeliest of 128256", lambda: logprobs(logits, tokens, 20))


def _penalties_cases() -> Iterator[AotCase]:
    def floats(*shape: int) -> Tensor:
        return meta(*shape, dtype=torch.float32)

    def ints(*shape: int) -> Tensor:
        return meta(*shape, dtype=torch.int64)

    yield AotCase(
        "16 rows of 8192 tokens",
        lambda: apply_penalties_(
            floats(16, 128256),
            ints(16, 8192),
            ints(16),
            ints(16),
            Penalties(floats(16), floats(16), floats(16)),
        ),
    )
    yield AotCase(
        "300 biases", lambda: add_logit_bias_(floats(16, 128256), ints(300), ints(300), floats(300))
    )


def _token_mask_cases() -> Iterator[AotCase]:
    logits = meta(64, 151936, dtype=torch.float32)
    rows, words = meta(32, dtype=torch.int64), meta(32, 4748, dtype=torch.int32)
    yield AotCase(
        "32 masks of 151936 tokens",
        lambda: apply_token_mask_(logits, rows, words),
    )


def aot_cases() -> Iterator[AotCase]:
    yield from _sample_cases()
    yield from _logprobs_cases()
    yield from _penalties_cases()
    yield from _token_mask_cases()
