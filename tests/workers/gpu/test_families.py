"""Small models of eight families in bfloat16: the logits are as exact as those of transformers.

On a GPU (`make gpu`), prompts are computed in two chunks, and decode steps replay captured graphs.
Elsewhere, one family runs with the operations' CPU forms, so that this file itself is tested.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.workers.engine.model_runner import ModelRunner
from penstock.workers.gpu.cuda_graphs import CudaCaptures
from penstock.workers.gpu.device_runner import DeviceRunner
from penstock.workers.gpu.graph_buckets import GraphBuckets
from penstock.workers.models.decoder import Decoder
from penstock.workers.weights.loading import load_model
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.devices import DEVICE, ON_GPU, runs_kernels
from tests.support.planner import Planner, make_cache

FAMILIES = (
    *("llama32", "qwen3", "gemma2", "gemma3"),
    *("gpt-oss", "qwen3-moe", "deepseek-v2-lite", "falcon-7b"),
)
LENGTHS, MAX_NEW, CHUNK = (40, 17, 33), 6, 24

pytestmark = [
    pytest.mark.gpu if ON_GPU else pytest.mark.slow,
    pytest.mark.skipif(runs_kernels() and not ON_GPU, reason="bfloat16 is wrong if interpreted"),
]


def make_runner(decoder: Decoder, planner: Planner) -> ModelRunner:
    cache = make_cache(decoder, planner.num_blocks + 1)
    cache.data.fill_(torch.nan)
    if not ON_GPU:
        return ModelRunner(decoder, cache)
    cache.data[:, :, -1] = 0  # scratch block, to which padding rows write
    runner = DeviceRunner(decoder, cache, GraphBuckets(4, 64))
    runner.capture(CudaCaptures(DEVICE))
    return runner


def logits_of(runner: ModelRunner, planner: Planner, texts: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits [prompts, MAX_NEW, V] for the tokens of `texts` after each prompt."""
    found: list[list[Tensor]] = [[] for _ in texts]
    while any(len(rows) < MAX_NEW for rows in found):
        plan = planner.plan(CHUNK)
        logits = runner.run(plan)
        rows = plan.rows[plan.samples].tolist()
        for row, values in zip(rows, logits, strict=True):
            found[row].append(values.double().cpu())
        planner.commit(plan, [texts[row][len(planner.tokens[row])] for row in rows])
    return torch.stack([torch.stack(rows[:MAX_NEW]) for rows in found])


@torch.inference_mode()
def reference_logits(model: Any, texts: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
    """Return the logits of transformers for the same tokens, computed in `dtype`."""
    model = model.to(dtype)
    rows = []
    for text, length in zip(texts, LENGTHS, strict=True):
        tokens = torch.tensor([list(text)], device=model.device)
        rows.append(model(tokens).logits[0, length - 1 : length - 1 + MAX_NEW].double().cpu())
    return torch.stack(rows)


def errors(found: Tensor, exact: Tensor) -> Tensor:
    """Return the relative error of each position."""
    relative: Tensor = (found - exact).norm(dim=-1) / exact.norm(dim=-1)
    return relative


@pytest.mark.parametrize("family", FAMILIES if ON_GPU else FAMILIES[:1])
def test_logits_are_as_exact_as_those_of_transformers(family: str, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, family)
    # Round the weights to bfloat16, so that both models have equal weights.
    reference = reference.to(DEVICE, torch.bfloat16)
    numbers = np.random.default_rng(5)
    texts = [numbers.integers(4, VOCAB_SIZE, n + MAX_NEW + 1).tolist() for n in LENGTHS]
    theirs = reference_logits(reference, texts, torch.bfloat16)
    exact = reference_logits(reference, texts, torch.float32)

    _, decoder = load_model(tmp_path, "bfloat16", DEVICE)
    prompts = [text[:length] for text, length in zip(texts, LENGTHS, strict=True)]
    planner = Planner(prompts, MAX_NEW + 1)
    ours = logits_of(make_runner(decoder, planner), planner, texts)
    # Compare medians, because rounding may change the expert that a token chooses.
    # Both models round to bfloat16 about as often, so their errors are of similar size.
    found, allowed = errors(ours, exact).median(), 2 * errors(theirs, exact).median()
    assert found <= allowed, f"relative error {found:.1e}, at most {allowed:.1e} expected"
    assert ours.isfinite().all()
