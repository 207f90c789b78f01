"""Compares the CPU time of Penstock's batcher with that of vLLM's scheduler.

`python -m penstock.loadtests.micro.scheduler` runs both schedulers in the same cells, without a
model and with dummy tokens. A cell is an initial state and a number of steps. Each scheduler runs
in its own process, because the two need different environments. The schedulers alternate in each
cell, and their thread CPU time is measured.
"""

import contextlib
import dataclasses
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.comparison.environments import NotInstalled
from penstock.loadtests.micro.ab_runner import MeasurementFailed, Quantiles, run
from penstock.loadtests.micro.scheduler.cells import CELLS, Cell
from penstock.loadtests.micro.scheduler.processes import Scheduler, interpreters, started

_OURS, _THEIRS = "on_penstock", "on_vllm"


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """Settings of the measurement."""

    rounds: int = option(5, "measured rounds of each cell, after one warm-up round")
    cells: tuple[str, ...] = option((), "names of cells; default: all")
    save_json: str = option("", "write the results to this file")

    @property
    def chosen(self) -> list[Cell]:
        """The selected cells. Raises MeasurementFailed if a name is unknown."""
        names = [cell.name for cell in CELLS]
        for name in self.cells:
            if name not in names:
                raise MeasurementFailed(
                    f"unknown cell {name!r}: expected one of {', '.join(names)}"
                )
        return [cell for cell in CELLS if not self.cells or cell.name in self.cells]


def microseconds(cell: Cell, measured: dict[str, Any]) -> float:
    """Return the mean CPU time per step.

    The mean includes the time of the submission if `cell.submission_counts`.
    """
    submitted = measured["submit_ns"] if cell.submission_counts else 0
    return float(submitted + sum(measured["step_ns"])) / len(measured["step_ns"]) / 1000


def checked(cell: Cell, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Raise MeasurementFailed unless both sides did the work of the cell.

    Both sides must compute the same number of tokens, and preempt as often as the cell requires.
    """
    for side, measured in (("Penstock's", ours), ("vLLM's", theirs)):
        if measured["preempted"] < cell.least_preempted:
            raise MeasurementFailed(
                f"{cell.name}: {side} scheduler preempted {measured['preempted']} times, "
                f"but a measurement of preemption needs at least {cell.least_preempted}"
            )
    if ours["tokens"] != theirs["tokens"]:
        raise MeasurementFailed(
            f"{cell.name}: Penstock scheduled {ours['tokens']} tokens and vLLM {theirs['tokens']}: "
            "expected equal numbers"
        )


async def _measure(options: Options) -> dict[str, Any]:
    with _both() as sides:
        results = {cell.name: _alternate(cell, sides, options.rounds) for cell in options.chosen}
        about = {name: side.about for name, side in sides.items()}
    figures = {cell.name: _figures(cell, results[cell.name]) for cell in options.chosen}
    _show(options.chosen, figures)
    return {"sides": about, "cells": figures}


@contextlib.contextmanager
def _both() -> Iterator[dict[str, Scheduler]]:
    try:
        pythons = interpreters()
    except NotInstalled as error:
        raise MeasurementFailed(str(error)) from None
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(started(name, pythons[name])) for name in pythons}


def _alternate(
    cell: Cell, sides: dict[str, Scheduler], rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """Measure both sides alternately (A B A B). The first round is a warm-up and left out."""
    taken: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(rounds + 1):
        for name, side in sides.items():
            taken[name].append(side.measure(cell))
        checked(cell, taken[_OURS][-1], taken[_THEIRS][-1])
    return {name: measured[1:] for name, measured in taken.items()}


def _figures(cell: Cell, taken: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return quantiles of each scheduler's CPU time per step, in µs, and of their ratio."""
    means = {name: [microseconds(cell, each) for each in taken[name]] for name in taken}
    medians = {
        name: [statistics.median(each["step_ns"]) / 1000 for each in taken[name]] for name in taken
    }
    ratios = [b / a for a, b in zip(means[_OURS], means[_THEIRS], strict=True)]
    last = taken[_OURS][-1]
    return {
        "about": cell.about,
        "steps": len(last["step_ns"]),
        "tokens": last["tokens"],
        "preempted": last["preempted"],
        "ours_us": dataclasses.asdict(Quantiles.of(means[_OURS])),
        "vllm_us": dataclasses.asdict(Quantiles.of(means[_THEIRS])),
        "ours_median_step_us": dataclasses.asdict(Quantiles.of(medians[_OURS])),
        "vllm_median_step_us": dataclasses.asdict(Quantiles.of(medians[_THEIRS])),
        "speedup": dataclasses.asdict(Quantiles.of(ratios)),
    }


def _show(cells: Sequence[Cell], figures: dict[str, Any]) -> None:
    table = Table(title="CPU time to plan and commit a step, µs (median of the rounds)")
    for column in ("cell", "Penstock", "vLLM", "times cheaper (80% of rounds)"):
        table.add_column(column, justify="left" if column == "cell" else "right")
    for cell in cells:
        found = figures[cell.name]
        ratio = found["speedup"]
        table.add_row(
            cell.name,
            f"{found['ours_us']['median']:,.0f}",
            f"{found['vllm_us']['median']:,.0f}",
            f"{ratio['median']:.1f} ({ratio['low']:.1f} to {ratio['high']:.1f})",
        )
    Console().print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the measurement, print and save its results, and return the exit code."""
    program = "python -m penstock.loadtests.micro.scheduler"
    about = "CPU time of scheduling a step in Penstock and in vLLM."
    (options,) = read_flags(program, about, (Options,), arguments)
    return run(lambda: _measure(options), dataclasses.asdict(options), options.save_json)


if __name__ == "__main__":
    sys.exit(main())
