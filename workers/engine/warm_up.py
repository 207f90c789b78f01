"""What an engine computes before it serves, so that no request pays for what is made once."""

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
    logprobs=1,
    max_tokens=2,
)

MIN_PROMPT_TOKENS = 64  # tokens


def warm_up_sequences(limits: SchedulerConfig, compiles: bool) -> Iterator[NewSequence]:
    """To be computed one after another: the largest prompt of one step, and a decode.

    compiles: kernels are compiled when they are first launched, and which ones a mixture of experts
    launches follows the number of tokens: so prompts of half as many tokens and so on, and one that
    is drawn with every wish, come too.
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
    """That finds none of its blocks cached."""
    key = f"warm-up of {length}"
    return NewSequence(key, [0] * length, length, params, salt=key.encode())


def warm_up_block_moves(kv: Tensor) -> None:
    """What a KV transfer and a fork launch, once: block 0 goes where it is already.

    kv: this rank's whole cache, see `kernels.blocks`; nothing else may write to its first block
    meanwhile. Parts of heads or layers take the same kernels, where a head has a multiple of 128
    bytes in a block.
    """
    first = torch.zeros(1, dtype=torch.int32, device=kv.device)
    copy_blocks(kv, first.to(torch.int64), first.to(torch.int64))
    layers, heads = slice(0, kv.shape[0]), slice(0, kv.shape[3])
    staged = gather_blocks(kv, first, layers, heads)
    scatter_blocks(kv, first, layers, heads, staged)
    checksum(staged)  # the host waits for it, and so for what was launched before
