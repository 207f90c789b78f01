"""Workers whose ranks are threads give the same answers as one rank.

`test_processes` tests more meshes.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch

from penstock.workers.engine.engine import Engine
from penstock.workers.layers.expert_parallel import ExpertParallelMoE
from penstock.workers.models.decoder import Decoder
from penstock.workers.parallel.rendezvous import LocalStore
from tests.support.ranks import (
    NUM_NEW,
    PROMPTS,
    agree,
    answer,
    follow,
    in_threads,
    lead,
    make_model,
    rank_config,
)
from tests.support.schedule_player import run_all_schedules

pytestmark = pytest.mark.slow

T = TypeVar("T")

NARROW_CACHES = ("bfloat16", "fp8", "int8")


def run_on_mesh(
    use: Callable[[Engine], T], model: Path, mesh: tuple[int, int, int], **more: Any
) -> T:
    """Return the result of `use` for the engine of a worker with this mesh."""

    def work(rank: int, store: LocalStore) -> T | None:
        config = replace(rank_config(model, mesh, **more), rank=rank)
        if rank:
            follow(config, store)
            return None
        return lead(config, store, use)

    found = in_threads(mesh[0] * mesh[1], work)[0]
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", (2, 2, 1)),
        ("falcon", (4, 1, 1)),
        ("falcon-rw", (2, 1, 1)),
        ("bloom", (2, 2, 1)),
        ("mpt", (4, 1, 1)),
        ("qwen2-moe", (4, 1, 2)),
        ("deepseek", (2, 1, 2)),
    ],
)
def test_mesh_gives_the_answers_of_one_rank(
    tmp_path: Path, name: str, mesh: tuple[int, int, int]
) -> None:
    model = make_model(tmp_path, name)
    expected = answer(Engine(rank_config(model)))
    assert len({token for tokens in expected.tokens for token in tokens}) > 8
    agree(run_on_mesh(answer, model, mesh), expected)


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1)])
@pytest.mark.parametrize("cache", NARROW_CACHES)
def test_narrow_cache_stays_close_to_that_of_one_rank(
    tmp_path: Path, mesh: tuple[int, int, int], cache: str
) -> None:
    """Another order of sums changes logits by less than 20% of the cache's rounding error."""
    model = make_model(tmp_path, "llama")
    wide = answer(Engine(rank_config(model)))
    expected = answer(Engine(rank_config(model, kv_cache_dtype=cache)))
    found = run_on_mesh(answer, model, mesh, kv_cache_dtype=cache)
    firsts = [torch.stack([rows[0] for rows in each.logits]) for each in (found, expected, wide)]
    ours, theirs, exact = firsts
    rounding = (theirs - exact).abs().max()
    assert rounding > 1e-3
    assert (ours - theirs).abs().max() < 0.2 * rounding
    assert found.tokens == expected.tokens


@pytest.mark.parametrize("mesh", [(2, 1, 1), (1, 2, 1)])
@pytest.mark.parametrize("cache", NARROW_CACHES)
def test_narrow_cache_gives_equal_bits_under_all_schedules(
    tmp_path: Path, mesh: tuple[int, int, int], cache: str
) -> None:
    sizes = {"deterministic": True, "kv_cache_mib": 2, "max_batched_tokens": 64}
    model = make_model(tmp_path, "llama")
    expected, *others = run_on_mesh(run_all_schedules, model, mesh, kv_cache_dtype=cache, **sizes)
    assert all(found == expected for found in others)


def test_expert_load_counts_every_token(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen2-moe")
    imbalances: list[float] = []

    def count(engine: Engine) -> list[torch.Tensor]:
        answer(engine)
        imbalances.append(engine.load().expert_imbalance)
        blocks = cast(Decoder, engine.executor.runner.decoder).layers
        return [block.mlp.load for block in blocks if isinstance(block.mlp, ExpertParallelMoE)]

    def work(rank: int, store: LocalStore) -> list[torch.Tensor] | None:
        config = replace(rank_config(model, (2, 1, 2)), rank=rank)
        if rank == 0:
            return lead(config, store, count)
        follow(config, store)
        return None

    loads = in_threads(2, work)[0]
    assert loads is not None
    # The last token of an answer is sampled, but it is not an input of the model.
    num_tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * (NUM_NEW - 1)
    assert [int(load.sum()) for load in loads] == [3 * num_tokens] * 2
    assert all((load > 0).sum() > 3 for load in loads)
    ratios = [float(load.max() / load.double().mean()) for load in loads]
    assert imbalances == [pytest.approx(sum(ratios) / 2)]
