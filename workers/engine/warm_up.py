"""Does one-time work before an engine serves, so that this work delays no request."""

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.common.sampling_params import SamplingParams
from penstock.kernels.kv_cache.block_copy import copy_blocks, gather_blocks, scatter_blocks
from penstock.kernels.kv_cache.checksum import checksum
from penstock.workers.scheduling.config import SchedulerConfig
from penstock.workers.scheduling.sequence import NewSequence

GREEDY = SamplingParams(temperature=0.0, max_tokens=2)

ALL_SAMPLING_OPTIONS = SamplingParams(
    temperature=1.0,
    top_k=2,
    top_p=0.9,
    min_p=0.1,
    typical_p=0.9,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias={0: 0.0},
    allowed_token_ids=(0, 1),
    logprobs=1,
    max_tokens=2,
)

MIN_PROMPT_TOKENS = 64  # prompts are not halved below this number of tokens


def warm_up_sequences(limits: SchedulerConfig, compiles: bool) -> Iterator[NewSequence]:
    """Yield the sequences to run, one after another.

    The first sequence has the longest prompt that fits into one step. If `compiles` is True,
    shorter prompts follow (1/2, 1/4, ... of this length), because the kernels of an MoE layer
    depend on the number of tokens. After them, one more sequence uses all sampling options.

    Args:
        limits: limits of the scheduler.
        compiles: True if kernels are compiled at their first launch.
    """
    most = max(1, min(limits.max_batched_tokens, limits.max_model_len - 2))
    yield _prompt(most, GREEDY)
    if not compiles:
        return
    length = most // 2
    while length >= MIN_PROMPT_TOKENS:
        yield _prompt(length, GREEDY)
        length //= 2
    yield _prompt(1, ALL_SAMPLING_OPTIONS)


def _prompt(length: int, params: SamplingParams) -> NewSequence:
    """Return a sequence whose salt prevents the reuse of cached blocks."""
    key = f"warm-up of {length}"
    return NewSequence(key, [0] * length, length, params, salt=key.encode())


def warm_up_block_moves(kv: Tensor) -> None:
    """Launch each kernel of KV transfers and forks once, copying block 0 onto itself.

    A transfer of only some layers or heads uses the same compiled kernels if the size of one head's
    data in a block is a multiple of 128 bytes.

    Args:
        kv: this rank's whole KV cache (see `kernels.kv_cache.block_copy`); no other code may write
            block 0 during the call.
    """
    first = torch.zeros(1, dtype=torch.int32, device=kv.device)
    copy_blocks(kv, first.to(torch.int64), first.to(torch.int64))
    layers, heads = slice(0, kv.shape[0]), slice(0, kv.shape[3])
    staged = gather_blocks(kv, first, layers, heads)
    scatter_blocks(kv, first, layers, heads, staged)
    checksum(staged)  # `checksum` reads its result on the host, so it waits for all kernels
