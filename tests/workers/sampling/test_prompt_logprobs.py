"""Compares logprobs of prompt tokens with those of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.common.sampling_params import SamplingParams
from penstock.workers.config import WorkerConfig
from penstock.workers.engine import model_runner
from penstock.workers.engine.engine import Engine
from penstock.workers.models.decoder import Decoder
from penstock.workers.sampling.sampler import TokenLogprobs
from penstock.workers.scheduling.sequence import NewSequence, Sibling
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import greedy_sequence, run_out

SLICE = 7  # a step of 16 tokens then has three slices
PROMPT = [3 + (7 * i) % 290 for i in range(50)]


@pytest.fixture(scope="module")
def folder_and_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("llama")
    return folder, make_checkpoint(folder, "llama2")


@pytest.fixture(autouse=True, params=[SLICE, model_runner.SCORED_ROWS])
def most_rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Set the slice size. Return a list to which each logits call appends its number of rows."""
    monkeypatch.setattr(model_runner, "SCORED_ROWS", request.param)
    sizes: list[int] = []
    logits = Decoder.logits

    def counted(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return logits(decoder, hidden)

    monkeypatch.setattr(Decoder, "logits", counted)
    return sizes


@pytest.fixture
def engine(folder_and_model: tuple[Path, Any]) -> Engine:
    config = WorkerConfig(
        "w",
        folder_and_model[0],
        kv_cache_mib=1,
        max_sequences=4,
        max_batched_tokens=16,
        dtype="float32",
    )
    return Engine(config)


@pytest.fixture(scope="module")
def logprobs(folder_and_model: tuple[Path, Any]) -> torch.Tensor:
    """Expected log probabilities [tokens - 1, vocabulary] of all prompt tokens except the first."""
    with torch.inference_mode():
        logits = folder_and_model[1](torch.tensor([PROMPT])).logits[0, :-1]
    return torch.log_softmax(logits.float(), -1)


def scored_sequence(key: str, count: int, known: int = 1, num_siblings: int = 0) -> NewSequence:
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=count)
    siblings = tuple(Sibling(1 + i, PROMPT) for i in range(num_siblings))
    return NewSequence(key, PROMPT, len(PROMPT), params, siblings=siblings, prompt_known=known)


def run_scored(engine: Engine, new: NewSequence) -> list[TokenLogprobs]:
    """Return the prompt's logprobs; check that they arrive in order and before the first token."""
    engine.submit(new)
    found: list[TokenLogprobs] = []
    position, started = new.prompt_known, False
    while (result := engine.step()).output is not None:
        for prompt in result.prompts:
            assert (prompt.key, prompt.position) == (new.key, position)
            assert not started
            position += len(prompt.entries)
            found += [entry for entry in prompt.entries if entry is not None]
        started |= new.key in result.output.keys
    assert position == len(PROMPT)
    return found


def check(found: list[TokenLogprobs], logprobs: torch.Tensor, first: int, count: int) -> None:
    assert len(found) == len(PROMPT) - first
    for position, entry in enumerate(found, start=first):
        row = logprobs[position - 1]
        assert entry.chosen == pytest.approx(row[PROMPT[position]].item(), abs=1e-4)
        best = row.topk(count)
        assert entry.tokens == best.indices.tolist()
        assert entry.values == pytest.approx(best.values.tolist(), abs=1e-4)
        assert entry.rank == 1 + int((row > row[PROMPT[position]]).sum())


@pytest.mark.parametrize("num_siblings", [0, 2])
def test_prompt_logprobs_in_chunks_and_with_a_warm_cache(
    engine: Engine, logprobs: torch.Tensor, num_siblings: int
) -> None:
    for key in ("cold", "warm"):
        check(
            run_scored(engine, scored_sequence(key, 3, num_siblings=num_siblings)), logprobs, 1, 3
        )
    engine.batcher.check()


def test_positions_with_known_logprobs_may_come_from_the_cache(
    engine: Engine, logprobs: torch.Tensor
) -> None:
    run_scored(engine, scored_sequence("first", 0))
    before = engine.load().prompt_tokens_computed
    check(run_scored(engine, scored_sequence("again", 2, known=40)), logprobs, 40, 2)
    assert engine.load().prompt_tokens_computed - before == len(PROMPT) - 39


def test_other_sequences_are_unaffected(engine: Engine, logprobs: torch.Tensor) -> None:
    engine.submit(greedy_sequence("alone", PROMPT[:20], 9))
    expected = run_out(engine)["alone"]
    engine.submit(greedy_sequence("beside", PROMPT[:20], 9, salt=b"x"))
    engine.step()
    check(run_scored(engine, scored_sequence("a", 1)), logprobs, 1, 1)
    engine.submit(greedy_sequence("after", PROMPT[:20], 9))
    assert run_out(engine)["after"] == expected


def test_logits_of_scored_tokens_exist_in_slices(engine: Engine, most_rows: list[int]) -> None:
    found = run_scored(engine, scored_sequence("s", 2))
    assert len(found) == len(PROMPT) - 1
    assert max(most_rows) <= model_runner.SCORED_ROWS
    assert sum(most_rows) >= len(PROMPT) - 1
