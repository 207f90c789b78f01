"""The training stages of `make train-demo`: their limits, and a run of only the tools stage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from tests.training.test_fit import TINY
from training import checkpoint, evaluate, train
from training.chat import TEMPLATE, TOOL_TEMPLATE
from training.evaluate import Score
from training.fit import Progress
from training.model import Llama
from training.tasks import FAMILIES
from training.train import MODELS, Maker, Options

SCORES = [Score("addition", 19, 20)]
RECIPES = (train.DEMO_RECIPE, *train.REVIEWS, *train.TOOL_RECIPES)


def test_all_stages_together_are_limited_to_70_minutes() -> None:
    assert sum(recipe.minutes for recipe in (*RECIPES, train.SMALL_RECIPE)) == pytest.approx(
        train.MINUTES
    )
    assert train.MINUTES <= 70


def test_weights_of_stages_are_those_of_families() -> None:
    assert all(set(recipe.weights) <= set(FAMILIES) for recipe in RECIPES)


def test_every_stage_has_other_random_examples() -> None:
    assert len({recipe.stage for recipe in RECIPES}) == len(RECIPES)


@pytest.fixture
def maker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Maker:
    """Return a maker whose tiny model has finished all stages but the tools stage (fake scores)."""

    def measure(answer: object, count: int, **rest: Any) -> list[Score]:
        return [*SCORES, *([Score("lookup", 9, 10)] if "lookup" in rest["families"] else [])]

    monkeypatch.setattr(evaluate, "measure", measure)
    short = tuple(replace(recipe, steps=2, rows=1) for recipe in train.TOOL_RECIPES)
    monkeypatch.setattr(train, "TOOL_RECIPES", short)
    tokenizer = Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json"))
    maker = Maker("demo", tokenizer, Options(tmp_path, 0, train.MINUTES, 20, "tools"))
    maker._keep(Llama(TINY), Progress())
    evaluate.write_scores(SCORES, maker.folder)
    assert template_of(maker) == TEMPLATE
    return replace(maker, tools=True)


def template_of(maker: Maker) -> str:
    """Return the chat template in the model's folder."""
    config = json.loads((maker.folder / "tokenizer_config.json").read_text())
    return str(config["chat_template"])


def test_stage_about_tools_continues_the_model_and_changes_its_template(maker: Maker) -> None:
    model, progress = train._make_demo(maker)
    before = model.embed_tokens.weight.detach().clone()
    train._teach_tools(maker, model, progress)
    after = checkpoint.load(maker.folder).embed_tokens.weight
    assert 0 < (after - before).abs().max() < 0.01
    assert template_of(maker) == TOOL_TEMPLATE
    assert [score.family for score in evaluate.read_scores(maker.folder)] == ["addition", "lookup"]
    card = (maker.folder / "README.md").read_text()
    assert "| 19/20 | 95.0% (19/20) | yes |" in card
    assert "about tools: 6 steps" in card
    assert "- command: `python -m training.train --resume tools`" in card
    assert "cost of the whole is not known" in card
    assert "0 steps" not in card
    assert "a look-up" in card


def test_small_model_does_not_learn_tools(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(MODELS / "demo" / "tokenizer.json"))
    maker = Maker("demo-small", tokenizer, Options(tmp_path, 0, train.MINUTES, 20, ""))
    assert not {"calculator", "lookup", "tool_result", "no_tool"} & set(maker.families)
    assert {"calculator", "lookup"} < set(replace(maker, tools=True).families)


def test_average_is_the_mean_of_the_weights() -> None:
    first, second, mean = Llama(TINY), Llama(TINY), Llama(TINY)
    train.average_(mean, [first, second])
    for a, b, c in zip(first.parameters(), second.parameters(), mean.parameters(), strict=True):
        assert torch.allclose((a + b) / 2, c)
