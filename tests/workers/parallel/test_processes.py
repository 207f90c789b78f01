"""Workers whose ranks are processes: every mesh gives the answers of one rank.

All cases share one group of processes, so that each process imports torch only once.
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
def test_every_mesh_gives_the_answers_of_one_rank(
    ranks: RankProcesses, folder: Path, name: str, mesh: tuple[int, int, int]
) -> None:
    model, expected = one_rank(folder, name)
    assert len({token for tokens in expected.tokens for token in tokens}) > 8
    agree(ranks.answers(model, mesh), expected)


@pytest.mark.parametrize(
    ("name", "mesh"), [("llama", (4, 1, 1)), ("qwen2-moe", (4, 1, 2)), ("deepseek", (2, 2, 2))]
)
def test_repeated_runs_on_one_mesh_give_equal_bits(
    ranks: RankProcesses, folder: Path, name: str, mesh: tuple[int, int, int]
) -> None:
    model, _ = one_rank(folder, name)
    first, second = (ranks.answers(model, mesh) for _ in range(2))
    assert first.tokens == second.tokens
    for one, other in zip(first.logits, second.logits, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("name", "mesh"), [("llama", (2, 1, 1)), ("qwen2-moe", (2, 1, 2))])
def test_deterministic_mode_gives_equal_bits_with_two_ranks(
    ranks: RankProcesses, folder: Path, name: str, mesh: tuple[int, int, int]
) -> None:
    """Results are bitwise identical for any batch and for all workers with this mesh."""
    model, _ = one_rank(folder, name)
    sizes = {"deterministic": True, "kv_cache_mib": 2, "max_batched_tokens": 64}
    workers = [run_all_schedules_after_warm_up, *([run_all_schedules] if name == "llama" else [])]
    expected, *others = [
        found for use in workers for found in ranks.result_of(use, model, mesh, **sizes)
    ]
    assert len(others) >= 3
    assert all(found == expected for found in others)


def test_bfloat16_logits_are_close_to_those_of_one_rank(ranks: RankProcesses, folder: Path) -> None:
    model, _ = one_rank(folder, "llama")
    found = ranks.answers(model, (2, 1, 1), dtype="bfloat16")
    expected = answer(Engine(rank_config(model, dtype="bfloat16")))
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours[0], theirs[0], rtol=0.1, atol=0.2)


def test_killed_rank_fails_the_worker(tmp_path: Path) -> None:
    # Use a separate model: with its .wait file, a worker answers until a rank is killed.
    model = make_model(tmp_path / "llama", "llama")
    wait_file = model.with_suffix(".wait")
    wait_file.touch()
    with rank_processes(2) as two:
        two.begin(model, (2, 1, 1))
        assert two.receive(0) == "answering"
        two.processes[1].kill()
        error = two.receive(0)
    assert isinstance(error, RuntimeError)
    assert "RankLost" in str(error)
