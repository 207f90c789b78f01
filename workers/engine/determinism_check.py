"""Checks deterministic mode at start-up: results must not depend on chunking or batch.

Whether the kernels of a library are batch invariant depends on the machine. The check therefore
computes one prompt in one step, then in chunks together with another prompt, and finally the first
tokens of the prompt one by one. The KV of the three runs must be bitwise identical, and so must the
logits of the first two runs.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.common.sampling_params import SamplingParams
from penstock.workers.engine.engine import Engine
from penstock.workers.engine.results import StepResult
from penstock.workers.scheduling.sequence import NewSequence, StepPlan

# Tokens per chunk of the second run, and number of tokens that the third run computes one by one.
CHUNK_TOKENS, PREFIX_TOKENS = 37, 9
_TWO = SamplingParams(temperature=0.0, max_tokens=2)


def check_batch_invariance(engine: Engine) -> None:
    """Raise ValueError if results depend on the chunks of a prompt or on other sequences.

    Call this before the first submission, because the check replaces the scheduler.
    """
    length = max(1, min(engine.limits.max_batched_tokens, engine.limits.max_model_len - 2))
    prompt, other = (_prompt(engine, length, first) for first in (7, 11))
    kv, logits = _bits(engine, [prompt], length)
    batch = [prompt, other[: length // 2 + 1]][: engine.limits.max_sequences]
    kv_in_pieces, logits_in_pieces = _bits(engine, batch, CHUNK_TOKENS)
    kv_by_token, _ = _bits(engine, [prompt[:PREFIX_TOKENS]], 1)
    engine.reset_scheduler(engine.limits)
    begun = min(PREFIX_TOKENS, length)
    same = (
        torch.equal(kv, kv_in_pieces)
        and torch.equal(logits, logits_in_pieces)
        and torch.equal(kv[:begun], kv_by_token[:begun])
    )
    if not same:
        raise ValueError(
            "deterministic mode is not available on this machine: a prompt computed in chunks "
            "gave different bits than the same prompt computed in one piece. Start the worker "
            "without deterministic mode"
        )


def _prompt(engine: Engine, length: int, first: int) -> list[int]:
    return [(first + 7919 * at) % engine.spec.vocab_size for at in range(length)]


def _bits(
    engine: Engine, prompts: Sequence[list[int]], max_batched_tokens: int
) -> tuple[Tensor, Tensor]:
    """Run prompts with two answer tokens each; return KV and logits of the first prompt.

    Returns:
        KV of the last layer, [tokens, sides, heads, D] (sides: K and V), and the logits from which
        the two answer tokens were sampled, [2, vocab_size].
    """
    limits = replace(
        engine.limits, max_sequences=len(prompts), max_batched_tokens=max_batched_tokens
    )
    engine.reset_scheduler(limits)
    batcher, executor, outputs = engine.batcher, engine.executor, engine.outputs
    for key, prompt in enumerate(prompts):
        engine.submit(NewSequence(key, prompt, len(prompt), _TWO, salt=b"%d" % key))
    written, drawn = [], []
    result = StepResult()
    while (plan := batcher.plan()) is not None:
        outputs.drain_events(result)
        executor.broadcast(plan)
        logits = executor.execute_model(plan)
        first = batcher.table.keys[plan.rows] == 0
        written.append(_written(engine, plan, first))
        drawn.append(logits[torch.from_numpy(np.flatnonzero(first[plan.samples]))])
        outputs.commit(plan, executor.sample(plan, logits, batcher.table), 0.0, result)
    return torch.cat(written), torch.cat(drawn)


def _written(engine: Engine, plan: StepPlan, of: npt.NDArray[np.bool_]) -> Tensor:
    """Return [tokens, sides, heads, D]: KV of the last layer that a step wrote.

    `of` [B] is True for those sequences of the plan whose KV is returned.
    """
    slots = torch.from_numpy(plan.slots[of.repeat(np.diff(plan.query_starts))].astype(np.int64))
    block_size = engine.limits.block_size
    return engine.cache.data[-1][:, slots // block_size, :, slots % block_size].cpu()
