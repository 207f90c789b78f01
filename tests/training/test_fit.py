"""The training loop: a tiny model learns, reproducibly, within its step and time limits."""

from __future__ import annotations

import dataclasses
import time

import pytest
import torch
from tokenizers import Tokenizer

from training.data import BatchMaker
from training.fit import Progress, Recipe, answer_loss, distilled, fit, learning_rate
from training.model import Llama, LlamaShape
from training.train import MODELS

TOKENIZER = Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json"))
TINY = LlamaShape(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    intermediate_size=48,
    head_dim=16,
)
RECIPE = Recipe(steps=12, minutes=1, rows=2, length=64, long_rows=1, long_length=128)


def tiny_run(seed: int) -> tuple[Llama, list[int], Progress]:
    """Train a tiny model; return the model, the steps at which it was saved, and its progress."""
    torch.manual_seed(seed)
    model = Llama(TINY)
    saved: list[int] = []
    recipe = dataclasses.replace(RECIPE, seed=seed, checkpoint_every=5)
    progress = fit(model, TOKENIZER, recipe, lambda _, at: saved.append(at.step), answer_loss)
    return model, saved, progress


def test_the_same_seed_gives_the_same_weights() -> None:
    first, second = tiny_run(0)[0], tiny_run(0)[0]
    for weight, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(weight, other)


def test_a_run_saves_at_intervals_and_at_the_end() -> None:
    _, saved, progress = tiny_run(0)
    assert saved == [5, 10, 12]
    assert (progress.step, progress.tokens) == (12, 12 * 128)
    assert progress.wall > 0


def test_a_run_ends_at_its_time_limit() -> None:
    recipe = dataclasses.replace(RECIPE, steps=10_000, minutes=0.5 / 60)
    progress = fit(Llama(TINY), TOKENIZER, recipe, lambda *_: None, answer_loss)
    assert progress.step < 10_000


def test_the_time_limit_counts_cpu_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", lambda: 0.0)
    progress = fit(
        Llama(TINY),
        TOKENIZER,
        dataclasses.replace(RECIPE, minutes=1e-6),
        lambda *_: None,
        answer_loss,
    )
    assert progress.step == RECIPE.steps
    assert progress.wall > 0 == progress.cpu


@pytest.mark.parametrize(
    ("step", "cpu", "done"), [(3, 0.0, 0.25), (3, 30.0, 0.5), (12, 30.0, 1.0), (1, 90.0, 1.5)]
)
def test_progress_is_the_larger_share_of_steps_or_minutes(
    step: int, cpu: float, done: float
) -> None:
    assert Progress(step=step, cpu=cpu).done(RECIPE) == done


def test_the_loss_falls() -> None:
    model = tiny_run(0)[0]
    torch.manual_seed(0)
    batch = BatchMaker(TOKENIZER, seed="0").short(4, 128)
    assert answer_loss(model, batch) < answer_loss(Llama(TINY), batch) - 0.3


def test_distillation_loss_is_lower_for_the_teacher_itself() -> None:
    teacher = tiny_run(0)[0]
    loss = distilled(teacher)
    batch = BatchMaker(TOKENIZER, seed="0").short(4, 128)
    assert loss(teacher, batch) < loss(Llama(TINY), batch)


def test_learning_rate_warms_up_stays_and_decays_to_zero() -> None:
    assert learning_rate(0.0, RECIPE) < 0.2
    assert learning_rate(0.05, RECIPE) == 1.0
    assert learning_rate(1.0, RECIPE) == 0.0
