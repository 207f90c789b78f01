"""The comparison with vLLM's scheduler: cells, what is driven, what is counted."""

import dataclasses
from typing import Any

import pytest

from penstock.loadtests.micro.ab_runner import MeasurementFailed
from penstock.loadtests.micro.scheduler import __main__ as scheduler
from penstock.loadtests.micro.scheduler.adapters import host
from penstock.loadtests.micro.scheduler.adapters.on_penstock import Adapter
from penstock.loadtests.micro.scheduler.cells import CELLS, Cell


def driven(cell: Cell) -> dict[str, Any]:
    asked = dataclasses.asdict(cell)
    return host.drive(Adapter(asked), asked)


def test_steps_are_taken_once_everybody_decodes() -> None:
    cell = Cell("c", "", running=5, running_len=20, num_steps=7, num_blocks=64)
    measured = driven(cell)
    assert len(measured["step_ns"]) == 7
    assert measured["tokens"] == 35
    assert measured["submit_ns"] == 0
    assert min(measured["step_ns"]) > 0


def test_what_arrives_is_run_to_its_end_and_finds_the_cached_prefix() -> None:
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
    measured = driven(cell)
    assert measured["tokens"] == 3 * (20 + 1)
    assert measured["submit_ns"] > 0


def test_blocks_that_lack_make_it_preempt() -> None:
    cell = Cell("c", "", running=8, running_len=32, output_len=99, num_blocks=28, num_steps=24)
    assert driven(cell)["preempted"] > 0


def test_submission_counts_where_it_is_part_of_the_cell() -> None:
    measured = {"submit_ns": 4000, "step_ns": [1000, 3000]}
    assert scheduler.microseconds(Cell("c", ""), measured) == 4.0
    apart = Cell("c", "", submission_counts=False)
    assert scheduler.microseconds(apart, measured) == 2.0


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"tokens": 9}, "9 by vLLM"), ({"preempted": 1}, "vLLM's preempted 1 times, not 3")],
)
def test_sides_that_did_not_do_the_same_are_not_compared(
    changes: dict[str, int], says: str
) -> None:
    cell = Cell("c", "", least_preempted=3)
    ours = {"tokens": 10, "preempted": 3}
    scheduler.checked(cell, ours, ours)
    with pytest.raises(MeasurementFailed, match=says):
        scheduler.checked(cell, ours, {**ours, **changes})


def test_cells_are_named_and_an_unknown_name_is_refused() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)
    assert scheduler.Options().chosen == list(CELLS)
    assert [cell.name for cell in scheduler.Options(cells=("decode 1",)).chosen] == ["decode 1"]
    with pytest.raises(MeasurementFailed, match="no cell 'x'"):
        _ = scheduler.Options(cells=("x",)).chosen
