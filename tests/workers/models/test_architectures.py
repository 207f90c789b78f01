"""Every causal language model of `transformers` behaves as `docs/models.md` documents.

The tests take their cases from this page. They fail if an architecture is missing from the page or
behaves differently.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.workers.config import WorkerConfig
from penstock.workers.engine.engine import Engine
from penstock.workers.models.config import UnsupportedModel
from penstock.workers.models.family_registry import FAMILIES
from penstock.workers.models.transformers_backend.model import TransformersModel
from penstock.workers.weights.loading import load
from tests.support.answers import check, expected_answers
from tests.support.architectures import (
    KINDS,
    WINDOW,
    is_reviewed,
    make_checkpoint,
    write_unconstructed,
)
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.engines import greedy_sequence, run_out
from tests.support.planner import generate

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
MAX_NEW = 6
# With these prompt lengths, chunks of CHUNK tokens cross the bounds of blocks and windows.
LENGTHS = (12, 37)
CHUNK = 21


def _section(title: str) -> str:
    return PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def _named(text: str) -> list[str]:
    return re.findall(r"`([A-Za-z0-9_]+(?:For[A-Z]\w+|Model|WithLMHead|Decoder))`", text)


@cache
def exact() -> list[str]:
    return _named(_section("Through `transformers`"))


@cache
def refused() -> dict[str, str]:
    """Return the documented part of the error message, by name of the refused architecture."""
    rows = (line.split("|") for line in _section("Refused, by name").splitlines() if "|" in line)
    return {name: row[1].strip() for row in rows for name in _named(row[3])}


def test_every_architecture_is_documented_once() -> None:
    others = [*exact(), *refused()]
    assert sorted(others) == sorted(KINDS.keys() - FAMILIES.keys())
    assert sorted(_named(_section("Ours"))) == sorted(FAMILIES)


def _has_windows(config: Any) -> bool:
    return "sliding_attention" in (getattr(config, "layer_types", None) or ())


@pytest.mark.slow
@pytest.mark.parametrize("name", exact())
def test_architecture_matches_transformers(name: str, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, KINDS[name])
    _, model = load(tmp_path, "auto", torch.device("cpu"))
    assert isinstance(model, TransformersModel)
    assert WINDOW in model.spec.windows or not _has_windows(reference.config.get_text_config())
    numbers = np.random.default_rng(5)
    prompts = [numbers.integers(4, VOCAB_SIZE, length).tolist() for length in LENGTHS]
    expected = expected_answers(reference, prompts, MAX_NEW)
    first = torch.stack([rows[0] for rows in expected[1]])
    assert (first[0] - first[1]).abs().max() > 0.01  # the logits depend on the prompt
    check(generate(model, prompts, MAX_NEW, CHUNK), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["GlmForCausalLM", "Gemma3ForConditionalGeneration"])
def test_engine_serves_architecture_through_transformers(name: str, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, KINDS[name])
    sizes: dict[str, Any] = {"kv_cache_mib": 1, "max_sequences": 8, "max_batched_tokens": 32}
    engine = Engine(WorkerConfig("w", tmp_path, **sizes))
    engine.warm_up()
    prompts = [list(range(4, 4 + length)) for length in (5, 50)]
    expected, _ = expected_answers(reference, prompts, MAX_NEW)
    for number, prompt in enumerate(prompts):
        engine.submit(greedy_sequence(number, prompt, MAX_NEW))
    assert run_out(engine) == dict(enumerate(expected))
    engine.batcher.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", refused())
def test_refused_architecture_raises_the_documented_error(name: str, tmp_path: Path) -> None:
    if is_reviewed(KINDS[name]):
        make_checkpoint(tmp_path, KINDS[name])
    else:
        write_unconstructed(tmp_path, KINDS[name])
    with pytest.raises(UnsupportedModel) as error:
        load(tmp_path, "auto", torch.device("cpu"))
    assert f"{name} is not supported: " in str(error.value)
    assert refused()[name] in str(error.value)
