"""The section "two ranks" of `make gpu`, over gloo: it notices wrong results and lost ranks."""

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from penstock.loadtests.gpu import two_ranks
from penstock.loadtests.gpu.options import Options
from penstock.loadtests.gpu.rank_collectives import check_collectives, inputs_of
from penstock.loadtests.gpu.replay import Answer, Request
from penstock.workers.parallel.collectives import ProcessGroup

CPU = torch.device("cpu")


@pytest.mark.process
def test_two_ranks_give_the_answers_of_one_rank() -> None:
    found = two_ranks.measure(Options(CPU, Path("unused"), None, "1b", small=True))
    assert found["failures"] == []
    assert len(found["collectives"]) == 20
    assert all(each["passed"] for each in found["collectives"].values())
    loads = found["loads_of_ranks"]
    assert [each["equal_answers"] for each in loads.values()] == [1.0, 1.0]


@pytest.mark.parametrize(("count", "needed"), [(1, True), (2, False)])
def test_one_gpu_is_named_as_the_reason_not_to_run(
    count: int, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert ("two GPUs are needed" in two_ranks.absent("cuda")) is needed
    if needed:
        options = Options(torch.device("cuda"), Path("unused"), None, "1b", small=True)
        expected = {"not_run": "two GPUs are needed, and torch finds 1", "failures": []}
        assert two_ranks.measure(options) == expected


def test_missing_protobuf_is_named_as_the_reason_not_to_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert two_ranks.absent("cpu") == ""
    monkeypatch.setitem(sys.modules, "google", None)
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    assert "make gpu-carry" in two_ranks.absent("cpu")


class StubGroup:
    """Computes the collectives of rank 0 in one process; the collective named `faulty` is wrong."""

    def __init__(self, dtype: torch.dtype, faulty: str) -> None:
        self._dtype, self._faulty = dtype, faulty

    def _tensors(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [inputs_of(rank, x.nbytes, self._dtype, 0) for rank in (0, 1)]

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self._tensors(x)
        return one + (0 if self._faulty == "all-reduce" else other)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        found = torch.stack(self._tensors(x))
        if self._faulty == "all-gather":
            found[1, -1] = torch.nan
        return found

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return self._tensors(x)[self._faulty == "broadcast"]

    def all_to_all(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        assert sent == received == [len(rows) // 2] * 2
        tensors = self._tensors(rows)[:: -1 if self._faulty == "all-to-all" else 1]
        return torch.cat([each.chunk(2)[0] for each in tensors])[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("faulty", ["none", "all-reduce", "all-gather", "broadcast", "all-to-all"])
def test_a_wrong_collective_is_noticed(
    faulty: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.loadtests.gpu.rank_collectives.SIZES", (1 << 10,))
    groups = {"in order": cast(ProcessGroup, StubGroup(dtype, faulty))}
    found = dict(check_collectives(groups, 0, CPU, dtype))
    wrong = [name for name, each in found.items() if not each["passed"]]
    assert len(found) == 4
    assert [name.split(" ")[0].rstrip(",") for name in wrong] == (
        [] if faulty == "none" else [faulty]
    )


def test_few_equal_first_tokens_are_a_failure() -> None:
    requests = [Request(4, 2)] * 4
    single = [Answer(tokens=[number, 1], times=[1.0, 2.0]) for number in range(4)]
    half = [Answer(tokens=[number % 2, 1], times=[2.0, 4.0]) for number in range(4)]
    none = [Answer(tokens=[9, 1], times=[1.0, 2.0]) for _ in range(4)]

    def compared(other: list[Answer]) -> dict[str, dict[str, Any]]:
        return two_ranks.compare({"4": requests}, {"4": single}, {"4": other})

    assert two_ranks.different(compared(half)) == []
    assert compared(half)["4"]["ratios"]["tokens_per_second"] == 0.5
    assert two_ranks.different(compared(none)) == [
        "4: only 0% of the first tokens are those of one rank"
    ]


class StubRank:
    """A rank 0 whose engine of two ranks gives other tokens than its engine of one rank."""

    loads: Mapping[str, Sequence[Request]] = {"4": [Request(4, 2)] * 4}

    def collectives(self) -> Iterator[tuple[str, dict[str, Any]]]:
        yield "all-reduce", {"passed": True, "error": 0.0}

    def engine_of_one_rank(self) -> Any:
        return "one rank"

    def lead(self, name: str, deterministic: bool, measures: bool) -> Any:
        return SimpleNamespace(stop=lambda: None, limits=SimpleNamespace(num_blocks=7))

    def all_answers(self, engine: Any) -> dict[str, list[Answer]]:
        first = 1 if engine == "one rank" else 2
        return {"4": [Answer(tokens=[first, 1], times=[1.0, 2.0]) for _ in range(4)]}


def test_last_results_of_the_leader_have_all_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_ranks, "check_deterministic", lambda *_: ["other tokens"])
    *_, last = two_ranks.run_leader(cast(two_ranks.Rank, StubRank()))
    assert last["failures"] == [
        "other tokens",
        "4: only 0% of the first tokens are those of one rank",
    ]


def test_if_a_rank_fails_the_other_one_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_ranks, "LOST_SECONDS", 0.0)
    for rank in (0, 1):
        (tmp_path / f"{rank}.txt").write_text(f"words of {rank}")
    codes = ("import time; time.sleep(100)", "raise SystemExit(3)")
    processes = [subprocess.Popen([sys.executable, "-c", code]) for code in codes]
    failures = two_ranks._wait(processes, time.monotonic() + 90, tmp_path)
    assert [failure.split(";")[0] for failure in failures] == [
        "rank 0 was stopped",
        "rank 1 exited with code 3",
    ]
    assert failures[1].endswith("words of 1")
