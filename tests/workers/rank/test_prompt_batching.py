"""Number of prompt tokens after which a CPU step begins no further prompt."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.spec import ExpertsSpec, ModelSpec, read_spec
from penstock.workers.rank import prompt_batching
from penstock.workers.rank.prompt_batching import MIN_TOKENS, enough_prompt_tokens
from tests.support.tiny import tiny_checkpoint


@pytest.fixture(autouse=True)
def no_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_batching, "has_amx", lambda: False)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def large(checkpoint: Path) -> ModelSpec:
    """A model with 12 x (4 x 1024 x 1024 + 3 x 1024 x 2730) = 151 M weights in its layers."""
    return replace(
        read_spec(checkpoint),
        num_layers=12,
        hidden_size=1024,
        intermediate_size=2730,
        num_heads=16,
        num_kv_heads=16,
        head_dim=64,
    )


def test_large_models_need_few_tokens(large: ModelSpec) -> None:
    assert enough_prompt_tokens(large, 1) == enough_prompt_tokens(large, 2) == MIN_TOKENS


def test_small_models_and_many_threads_need_more_tokens(large: ModelSpec, checkpoint: Path) -> None:
    assert enough_prompt_tokens(large, 32) == pytest.approx(32 * 7.5e9 / 151e6, rel=0.01)
    assert enough_prompt_tokens(read_spec(checkpoint), 1) > 10_000


def test_every_expert_needs_tokens(large: ModelSpec) -> None:
    experts = ExpertsSpec(
        num_experts=16,
        top_k=2,
        inner_size=1365,
        normalise=True,
        shared_size=0,
        layers=(True,) * 12,
    )
    assert enough_prompt_tokens(replace(large, experts=experts), 1) == 8 * MIN_TOKENS


def test_amx_has_no_limit(large: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_batching, "has_amx", lambda: True)
    assert enough_prompt_tokens(large, 1) == 0


@pytest.mark.parametrize("given", [{}, {"max_batched_tokens": 512}])
def test_an_operator_replaces_the_limit_by_a_token_budget(
    checkpoint: Path, given: dict[str, Any]
) -> None:
    config = WorkerConfig("w", checkpoint, kv_cache_mib=1, **given)
    assert (Engine(config).limits.enough_prompt_tokens == 0) == bool(given)
