"""Workers of several ranks, each a process: every shape gives the answers of one rank.

One group of processes serves all cases; torch is loaded once in each.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from penstock.workers.engine.engine import Engine
from tests.support.rank_processes import RankProcesses, rank_processes
from tests.support.ranks import Answers, agree, answer, make_model, rank_config
from tests.support.schedule_player import run_all_schedules, run_all_schedules_after_warm_up

pytestmark = [pytest.mark.process, pytest.mark.timeout(1200)]

DENSE = [(2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1)]
SPARSE = [*DENSE, (2, 1, 2), (4, 1, 2), (4, 1, 4), (2, 2, 2)]
CASES = [
    *(("llama", mesh) for mesh in DENSE),
    *(("qwen2-moe", mesh) for mesh in SPARSE),
    *(("deepseek", mesh) for mesh in SPARSE),
    *((name, (4, 1, 1)) for name in ("qwen2", "phi3", "falcon")),
    *((name, (2, 1, 1)) for name in ("falcon-rw", "bloom", "mpt")),
    *((name, (4, 1, 2)) for name in ("gpt-oss", "deepseek-v2")),
]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankProcesses]:
    with rank_processes(4) as processes:
        yield processes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@cache
def one_rank(folder: Path, name: str) -> tuple[Path, Answers]:
    model = make_model(folder / name, name)
    return model, answer(Engine(rank_config(model)))


@pytest.mark.parametrize(("name", "mesh"), CASES)
def test_every_shape_gives_the_answers_of_one_rank(
    ranks: RankProcesses, folder: Path, name: str, mesh: tuple[int, int, int]
) -> None:
    model, expected = one_rank(folder, name)
    assert len({token for tokens in expected.tokens for token in tokens}) > 8
    agree(ranks.answers(model, mesh), expected)


@pytest.mark.parametrize(
    ("name", "mesh"), [("llama", (4, 1, 1)), ("qwen2-moe", (4, 1, 2)), ("deepseek", (2, 2, 2))]
)
def test_a_shape_gives_the_same_bits_twice(
    ranks: RankProcesses, folder: Path, name: str, mesh: tuple[int, int, int]
) -> None:
    model, _ = one_rank(folder, name)
    first, second = (ranks.answers(model, mesh) for _ in range(2))
    assert first.tokens == second.tokens
    for one, other in zip(first.logits, second.logits, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("name", "mesh"), [("llama", (2, 1, 1)), ("qwen2-moe", (2, 1, 2))])
def test_a_deterministic_worker_of_two_ranks(
    ranks: RankProcesses, folder: Path, name: str, mesh: tuple[int, int, int]
) -> None:
    """A request's bits are its own in any company, on this worker and on another of its shape."""
    model, _ = one_rank(folder, name)
    sizes = {"deterministic": True, "kv_cache_mib": 2, "max_batched_tokens": 64}
    workers = [run_all_schedules_after_warm_up, *([run_all_schedules] if name == "llama" else [])]
    expected, *others = [
        found for use in workers for found in ranks.made_by(use, model, mesh, **sizes)
    ]
    assert len(others) >= 3
    assert all(found == expected for found in others)


def test_narrow_numbers(ranks: RankProcesses, folder: Path) -> None:
    model, _ = one_rank(folder, "llama")
    found = ranks.answers(model, (2, 1, 1), dtype="bfloat16")
    expected = answer(Engine(rank_config(model, dtype="bfloat16")))
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours[0], theirs[0], rtol=0.1, atol=0.2)


def test_a_dead_rank_ends_the_worker(tmp_path: Path) -> None:
    model = make_model(tmp_path / "llama", "llama")  # of its own: its workers wait for ever
    running = model.with_suffix(".wait")
    running.touch()
    with rank_processes(2) as two:
        two.begin(model, (2, 1, 1))
        assert two.hear(0) == "answering"
        two.processes[1].kill()
        error = two.hear(0)
    assert isinstance(error, RuntimeError)
    assert "RankLost" in str(error)
