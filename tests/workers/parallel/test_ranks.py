"""Workers of several ranks, in threads: the answers of one rank. More shapes: `test_processes`."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from penstock.workers.engine import Engine
from penstock.workers.layers.spread_experts import SpreadExperts
from penstock.workers.models.decoder import Decoder
from penstock.workers.parallel.meeting import LocalStore
from tests.support.ranks import (
    NUM_NEW,
    PROMPTS,
    Answers,
    agree,
    answer,
    follow,
    in_threads,
    lead,
    make_model,
    rank_config,
)

pytestmark = pytest.mark.slow


def answers_of(model: Path, mesh: tuple[int, int, int]) -> Answers:
    def work(rank: int, store: LocalStore) -> Answers | None:
        config = replace(rank_config(model, mesh), rank=rank)
        if rank:
            follow(config, store)
            return None
        return lead(config, store, answer)

    found = in_threads(mesh[0] * mesh[1], work)[0]
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", (2, 2, 1)),
        ("falcon", (4, 1, 1)),
        ("qwen2-moe", (4, 1, 2)),
        ("deepseek", (2, 1, 2)),
    ],
)
def test_the_answers_of_one_rank(tmp_path: Path, name: str, mesh: tuple[int, int, int]) -> None:
    model = make_model(tmp_path, name)
    expected = answer(Engine(rank_config(model)))
    assert len({token for tokens in expected.tokens for token in tokens}) > 8
    agree(answers_of(model, mesh), expected)


def test_the_load_of_experts_is_counted(tmp_path: Path) -> None:
    model = make_model(tmp_path, "qwen2-moe")
    told: list[float] = []

    def count(engine: Engine) -> list[torch.Tensor]:
        answer(engine)
        told.append(engine.load().expert_imbalance)
        blocks = cast(Decoder, engine._runner.decoder).layers
        return [block.mlp.load for block in blocks if isinstance(block.mlp, SpreadExperts)]

    def work(rank: int, store: LocalStore) -> list[torch.Tensor] | None:
        config = replace(rank_config(model, (2, 1, 2)), rank=rank)
        if rank == 0:
            return lead(config, store, count)
        follow(config, store)
        return None

    loads = in_threads(2, work)[0]
    assert loads is not None
    # The token drawn last is not computed.
    num_tokens = sum(map(len, PROMPTS)) + len(PROMPTS) * (NUM_NEW - 1)
    assert [int(load.sum()) for load in loads] == [3 * num_tokens] * 2
    assert all((load > 0).sum() > 3 for load in loads)
    ratios = [float(load.max() / load.double().mean()) for load in loads]
    assert told == [pytest.approx(sum(ratios) / 2)]
