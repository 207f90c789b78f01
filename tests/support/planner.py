"""A minimal scheduler for tests of the model runner."""

from collections.abc import Sequence

import numpy as np
import torch

from penstock.kernels.kv_cache.format import KvCacheFormat, format_of, scales
from penstock.workers.engine.model_runner import ModelRunner
from penstock.workers.models.protocols import Model
from penstock.workers.rank.kv_cache import KvCache
from penstock.workers.scheduling.sequence import StepPlan

BLOCK_SIZE = 16


class Planner:
    """Makes step plans for sequences in scattered blocks of a cache of minimal size."""

    def __init__(self, prompts: Sequence[Sequence[int]], max_new: int, seed: int = 0) -> None:
        self.tokens = [list(prompt) for prompt in prompts]
        self.computed = [0] * len(prompts)
        most = max(map(len, prompts)) + max_new
        self.width = -(-most // BLOCK_SIZE)
        self.num_blocks = self.width * len(prompts) + 3
        shuffled = np.random.default_rng(seed).permutation(self.num_blocks)
        used = shuffled[: self.width * len(prompts)]
        self.tables = used.reshape(len(prompts), self.width).astype(np.int32)

    def plan(self, chunk: int) -> StepPlan:
        """Return a plan with at most `chunk` tokens of each sequence that has tokens left."""
        todo = [len(tokens) - done for tokens, done in zip(self.tokens, self.computed, strict=True)]
        rows = [row for row, left in enumerate(todo) if left]
        lengths = [min(todo[row], chunk) for row in rows]
        spans = [
            (row, np.arange(self.computed[row], self.computed[row] + n))
            for row, n in zip(rows, lengths, strict=True)
        ]
        tables = self.tables[rows]
        slots = [
            self.tables[row][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for row, at in spans
        ]
        return StepPlan(
            number=1,
            rows=np.array(rows, np.int32),
            tokens=np.concatenate([np.array(self.tokens[row])[at] for row, at in spans]).astype(
                np.int32
            ),
            positions=np.concatenate([at for _, at in spans]).astype(np.int32),
            query_starts=np.cumsum([0, *lengths]).astype(np.int32),
            context_lens=np.array([at[-1] + 1 for _, at in spans], np.int32),
            block_tables=tables,
            slots=np.concatenate(slots).astype(np.int32),
            samples=np.array([todo[row] <= chunk for row in rows]),
        )

    def commit(self, plan: StepPlan, drawn: Sequence[int]) -> None:
        for row, length in zip(plan.rows, np.diff(plan.query_starts), strict=True):
            self.computed[row] += int(length)
        for row, token in zip(plan.rows[plan.samples], drawn, strict=True):
            self.tokens[row].append(token)


def make_cache(decoder: Model, num_blocks: int, form: KvCacheFormat | None = None) -> KvCache:
    """Return a cache of the format `form`, by default of the model's dtype."""
    spec = decoder.spec
    return KvCache(
        spec.num_layers,
        num_blocks,
        BLOCK_SIZE,
        spec.kv_shape,
        form or format_of(decoder.dtype),
        decoder.device,
    )


def generate(
    decoder: Model,
    prompts: Sequence[Sequence[int]],
    max_new: int,
    chunk: int = 10_000,
    form: KvCacheFormat | None = None,
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Return greedy answers of `max_new` tokens, and their logits [max_new, vocab_size].

    Before the first step, the cache is filled with NaN, as if its blocks had held a sequence with
    NaN.
    """
    planner = Planner(prompts, max_new)
    cache = make_cache(decoder, planner.num_blocks, form)
    (scales(cache.data) if cache.form.has_scales else cache.data).fill_(float("nan"))
    runner = ModelRunner(decoder, cache)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    while any(len(rows) < max_new for rows in logits):
        plan = planner.plan(chunk)
        found = runner.run(plan)
        planner.commit(plan, found.argmax(-1).tolist())
        for row, values in zip(plan.rows[plan.samples].tolist(), found, strict=True):
            # Copy the logits, because the next step reuses the runner's buffer.
            logits[row].append(values.clone())
    answers = [
        tokens[len(prompt) : len(prompt) + max_new]
        for tokens, prompt in zip(planner.tokens, prompts, strict=True)
    ]
    return answers, [torch.stack(rows[:max_new]) for rows in logits]
