"""The comparison with vLLM's scheduler: every configuration (cell) runs and counts correctly."""

import dataclasses
from typing import Any

import pytest

from penstock.loadtests.micro.ab_runner import MeasurementFailed
from penstock.loadtests.micro.scheduler import __main__ as scheduler
from penstock.loadtests.micro.scheduler.adapters import host
from penstock.loadtests.micro.scheduler.adapters.on_penstock import Adapter
from penstock.loadtests.micro.scheduler.cells import CELLS, Cell


def run_cell(cell: Cell) -> dict[str, Any]:
    fields = dataclasses.asdict(cell)
    return host.drive(Adapter(fields), fields)


def test_steps_are_timed_once_all_sequences_decode() -> None:
    cell = Cell("c", "", running=5, running_len=20, num_steps=7, num_blocks=64)
    measured = run_cell(cell)
    assert len(measured["step_ns"]) == 7
    assert measured["tokens"] == 35
    assert measured["submit_ns"] == 0
    assert min(measured["step_ns"]) > 0


def test_arriving_requests_run_to_their_end_and_reuse_the_prefix() -> None:
    cell = Cell(
        "c",
        "",
        arriving=3,
        arriving_len=100,
        shared=80,
        arriving_output_len=2,
        max_batched_tokens=1024,
        num_blocks=64,
    )
    measured = run_cell(cell)
    assert measured["tokens"] == 3 * (20 + 1)
    assert measured["submit_ns"] > 0


def test_lack_of_blocks_causes_preemption() -> None:
    cell = Cell("c", "", running=8, running_len=32, output_len=99, num_blocks=28, num_steps=24)
    assert run_cell(cell)["preempted"] > 0


def test_submission_counts_only_if_the_cell_includes_it() -> None:
    measured = {"submit_ns": 4000, "step_ns": [1000, 3000]}
    assert scheduler.microseconds(Cell("c", ""), measured) == 4.0
    without_submission = Cell("c", "", submission_counts=False)
    assert scheduler.microseconds(without_submission, measured) == 2.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 9}, "vLLM 9"),
        (
            {"preempted": 1},
            "vLLM's scheduler preempted 1 times, but a measurement of preemption needs at least 3",
        ),
    ],
)
def test_sides_with_different_work_are_not_compared(changes: dict[str, int], message: str) -> None:
    cell = Cell("c", "", least_preempted=3)
    penstock_result = {"tokens": 10, "preempted": 3}
    scheduler.checked(cell, penstock_result, penstock_result)
    with pytest.raises(MeasurementFailed, match=message):
        scheduler.checked(cell, penstock_result, {**penstock_result, **changes})


def test_cells_are_named_and_an_unknown_name_is_refused() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)
    assert scheduler.Options().chosen == list(CELLS)
    assert [cell.name for cell in scheduler.Options(cells=("decode 1",)).chosen] == ["decode 1"]
    with pytest.raises(MeasurementFailed, match="unknown cell 'x'"):
        _ = scheduler.Options(cells=("x",)).chosen
