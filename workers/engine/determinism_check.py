"""What a deterministic worker promises, tried before it is ready.

How a library computes so and so many rows is not ours to know on every machine. So one prompt is
computed whole, then in pieces beside another, then its beginning token by token: every key and
value that is written, and what is drawn from, must come out the same to the last bit.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.common.sampling_params import SamplingParams
from penstock.workers.engine.engine import Engine, StepResult
from penstock.workers.scheduling.batcher import Batcher
from penstock.workers.scheduling.sequence import NewSequence, StepPlan

CHUNK_TOKENS, PREFIX_TOKENS = 37, 9  # tokens
_TWO = SamplingParams(temperature=0.0, max_tokens=2)


def check_batch_invariance(engine: Engine) -> None:
    """ValueError where a token's bits depend on how its prompt is cut, or on other sequences.

    Only before `warm_up`, which leaves no trace of it.
    """
    length = max(1, min(engine.limits.max_batched_tokens, engine.limits.max_model_len - 2))
    prompt, other = (_prompt(engine, length, first) for first in (7, 11))
    kv, logits = _bits(engine, [prompt], length)
    batch = [prompt, other[: length // 2 + 1]][: engine.limits.max_sequences]
    kv_in_pieces, logits_in_pieces = _bits(engine, batch, CHUNK_TOKENS)
    kv_by_token, _ = _bits(engine, [prompt[:PREFIX_TOKENS]], 1)
    begun = min(PREFIX_TOKENS, length)
    same = (
        torch.equal(kv, kv_in_pieces)
        and torch.equal(logits, logits_in_pieces)
        and torch.equal(kv[:begun], kv_by_token[:begun])
    )
    if not same:
        raise ValueError(
            "deterministic cannot be had: on this machine a prompt computed in pieces gave other "
            "bits than the whole"
        )


def _prompt(engine: Engine, length: int, first: int) -> list[int]:
    return [(first + 7919 * at) % engine.spec.vocab_size for at in range(length)]


def _bits(
    engine: Engine, prompts: Sequence[list[int]], max_batched_tokens: int
) -> tuple[Tensor, Tensor]:
    """Of the first prompt and two tokens more: the last layer's keys and values, token by token,
    and the logits that were drawn from."""
    limits = replace(
        engine.limits, max_sequences=len(prompts), max_batched_tokens=max_batched_tokens
    )
    engine.batcher = Batcher(limits)
    for key, prompt in enumerate(prompts):
        engine.submit(NewSequence(key, prompt, len(prompt), _TWO, salt=b"%d" % key))
    written, drawn = [], []
    result = StepResult()
    while (plan := engine.plan(result)) is not None:
        logits = engine.compute(plan)
        first = engine.batcher.table.keys[plan.rows] == 0
        written.append(_written(engine, plan, first))
        drawn.append(logits[torch.from_numpy(np.flatnonzero(first[plan.samples]))])
        engine.commit(plan, engine.sample(plan, logits), 0.0, result)
    return torch.cat(written), torch.cat(drawn)


def _written(engine: Engine, plan: StepPlan, of: npt.NDArray[np.bool_]) -> Tensor:
    """What this step wrote of some of its sequences: [tokens, sides, heads, D]."""
    slots = torch.from_numpy(plan.slots[of.repeat(np.diff(plan.query_starts))].astype(np.int64))
    block_size = engine.limits.block_size
    return engine.cache.data[-1][:, slots // block_size, :, slots % block_size].cpu()
