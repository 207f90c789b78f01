"""The section "tuning" of `make gpu` rejects bad tiles and writes a file with the faster ones."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.kernels.triton_common.tuned_tiles import KERNELS, parse, tuned_tiles
from penstock.loadtests.gpu import tuning
from penstock.loadtests.gpu.clock import Timing
from penstock.loadtests.gpu.tuning_problems import Candidate, Problem, all_problems

CPU = torch.device("cpu")
SHAPE = {"experts": 8, "size": 64, "inner": 32, "rows": 16, "itemsize": 2}


def moe(outputs: int, num_stages: int = 3) -> Candidate:
    return {"rows": 16, "outputs": outputs, "inputs": 64, "num_warps": 4, "num_stages": num_stages}


def on_trial() -> Candidate:
    return dict(tuned_tiles("", "moe", **SHAPE) or moe(128))


@dataclass(frozen=True)
class PlannedWork:
    """A call that, like an attention plan, keeps the tiles that were current when it was made."""

    outputs: int

    def __call__(self) -> torch.Tensor:
        if self.outputs == 256:
            raise RuntimeError("out of resource: shared memory")
        return torch.full((4,), 1.0 if self.outputs == 32 else 4.0)


def planned_work() -> PlannedWork:
    return PlannedWork(on_trial()["outputs"])


def problem(*others: Candidate) -> Problem:
    work = {"one": planned_work, "other": planned_work}
    candidates = [moe(128), *others]
    return Problem("experts", "moe", SHAPE, candidates, work, planned_work)


def test_wrong_and_failing_candidates_have_a_reason() -> None:
    lines = list(tuning.check_candidates(problem(moe(32), moe(256), moe(64)), 0, 1, 0))
    assert [line["outcome"] for line in lines[::2]] == ["started"] * 4
    ended = lines[1::2]
    assert [line["outcome"] for line in ended] == ["passed", "failed", "failed", "passed"]
    assert ended[1]["why"] == "relative error 7.5e-01"
    assert "out of resource" in ended[2]["why"]
    after = list(tuning.check_candidates(problem(moe(32), moe(256), moe(64)), 1, 2, 1))
    assert [line["candidate"] for line in after] == [moe(64)] * 2


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Fake times in seconds, by the number of columns of the output tile."""
    seconds = {128: 4.0, 64: 2.0, 32: 8.0}

    def time_calls(calls: Sequence[PlannedWork], *_: Any) -> Timing:
        found = seconds[calls[0].outputs]
        return Timing(found, found, found, True)

    monkeypatch.setattr(tuning, "time_calls", time_calls)
    return seconds


def test_the_fastest_candidate_is_written_to_the_file(
    tmp_path: Path, speeds: dict[int, float]
) -> None:
    swept = tuning.sweep(problem(), [moe(128), moe(32), moe(64)], CPU, float("inf"))
    assert (swept["best"], swept["gain"], swept["num_timed"]) == (moe(64), 2.0, 3)
    path = tuning.write_tiles(tmp_path / "tiles", "NVIDIA H200", [swept])
    assert path.name == "NVIDIA_H200.json"
    assert parse(path) == {("moe", "experts=8,size=64,inner=32,rows=16,itemsize=2"): moe(64)}


def test_a_small_gain_is_not_written(tmp_path: Path, speeds: dict[int, float]) -> None:
    speeds[64] = 3.95
    swept = tuning.sweep(problem(), [moe(128), moe(64)], CPU, float("inf"))
    assert swept["best"] == moe(64)
    assert parse(tuning.write_tiles(tmp_path / "tiles", "x", [swept])) == {}


def test_without_time_the_default_stays(speeds: dict[int, float]) -> None:
    swept = tuning.sweep(problem(), [moe(128), moe(64)], CPU, 0.0)
    assert (swept["best"], swept["num_timed"]) == (moe(128), 1)


@pytest.mark.parametrize("is_small", [False, True])
def test_every_candidate_is_allowed_in_a_file(tmp_path: Path, is_small: bool) -> None:
    problems = all_problems(CPU, torch.float16, is_small)
    assert {each.kernel for each in problems} == {*KERNELS}
    keys = [(each.kernel, KERNELS[each.kernel].key(each.shape)) for each in problems]
    assert len(keys) == len({*keys})
    for each, (kernel, key) in zip(problems, keys, strict=True):
        assert len(each.candidates) == len({json.dumps(one) for one in each.candidates}) > 2
        for candidate in each.candidates:
            path = tmp_path / "one.json"
            path.write_text(json.dumps({"tiles": {kernel: {key: candidate}}}))
            assert parse(path) == {(kernel, key): candidate}
