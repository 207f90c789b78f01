"""Measures the KV transfer of a long prompt between two processes, compared with bare gloo.

`python -m penstock.loadtests.micro.transfer` starts a source and a destination process on this
machine. They have random KV and no model. They transfer blocks as two workers do, with control
channel, rank pair, checksums, and copies between cache and message buffers. Between the transfers,
the same two processes send the same number of bytes from one buffer into another over gloo. Each
round measures both (A B A B ...), so other load on the machine affects both.

The result is the ratio of the times, bare / transfer, of each round. With `--against DIR`, another
source tree is measured too, alternating with this one. That tree may be as old as commit 61ff4b3.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import penstock
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.micro.ab_runner import MeasurementFailed, Quantiles, run
from penstock.loadtests.micro.source_tree import SourceTree
from penstock.loadtests.micro.transfer.adapters.host import PROGRAM as SIDE
from penstock.loadtests.micro.transfer.adapters.host import Work

PROGRAM = "python -m penstock.loadtests.micro.transfer"
Figures = dict[str, Any]
"""The figures of `host.measure`, of one run or of several runs of one tree."""


@dataclasses.dataclass(frozen=True, slots=True)
class Amounts:
    """The KV to transfer, and the number of rounds."""

    tokens: int = option(4096, "length of the prompt")
    layers: int = option(16, "layers of the model")
    heads: int = option(8, "KV heads")
    head_dim: int = option(64, "features of a KV head; float32")
    block_size: int = option(16, "tokens per KV block")
    rounds: int = option(15, "rounds; each measures the transfer and bare gloo once")

    @property
    def work(self) -> Work:
        block_shape = self.layers, self.heads, self.block_size, self.head_dim
        return Work(self.tokens, block_shape, self.rounds)


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """Comparison and output."""

    against: str = option("", "also measure the source tree in this folder")
    runs: int = option(3, "with --against: runs of each tree, alternating")
    save_json: str = option("", "write the results to this file")


async def measure(program: Program, work: Work) -> dict[str, Any]:
    """Measure this tree, alternating with the tree of `--against` if given. Print the figures.

    Raises MeasurementFailed, ProgramFailed or ValueError.
    """
    here = SourceTree.at(Path(penstock.__file__).parent.parent)
    trees = {"now": here}
    if program.against:
        trees = {"then": SourceTree.at(Path(program.against)), **trees}
    runs: dict[str, list[Figures]] = {name: [] for name in trees}
    for _ in range(program.runs if program.against else 1):
        for name, tree in trees.items():
            runs[name].append(await measure_tree(tree, work))
    check_same_bytes([each for figures in runs.values() for each in figures])
    merged = {name: _merged(figures) for name, figures in runs.items()}
    for name, figures in merged.items():
        print(describe(name, figures))
    if program.against:
        for clock, kind in (("wall", "time"), ("cpu", "CPU time")):
            pairs = zip(runs["then"], runs["now"], strict=True)
            ratios = [_median(then, clock) / _median(now, clock) for then, now in pairs]
            print(f"then / now, {kind} of a transfer: {Quantiles.of(ratios)}")
    print(f"load average: {', '.join(f'{each:.1f}' for each in os.getloadavg())}")
    return {"figures": merged, "load_average": os.getloadavg()}


async def measure_tree(tree: SourceTree, work: Work) -> Figures:
    """Measure a tree once, in new processes. Raises ProgramFailed."""
    figures: Figures = await tree.run(str(SIDE), json.dumps(dataclasses.asdict(work)))
    return figures


def check_same_bytes(runs: Sequence[Figures]) -> None:
    """Raise MeasurementFailed unless all runs transferred the same bytes."""
    if len({(each["bytes"], each["fingerprint"]) for each in runs}) > 1:
        sizes = [each["bytes"] for each in runs]
        raise MeasurementFailed(
            "the runs transferred different data: expected the same bytes in every run; sizes in "
            f"bytes: {sizes}"
        )


def describe(name: str, figures: Figures) -> str:
    """Return the measurements of one source tree as text."""
    transfer, bare = figures["transfer"], figures["bare"]
    ratios = [b / t for b, t in zip(bare["wall"], transfer["wall"], strict=True)]
    mib = figures["bytes"] / (1 << 20)

    def line(kind: str, times: dict[str, list[float]]) -> str:
        return (
            f"  {kind:<9} {1e3 * Quantiles.of(times['wall']).median:7.1f} ms, "
            f"{figures['bytes'] / Quantiles.of(times['wall']).median / 1e9:5.2f} GB/s, "
            f"CPU time of both processes {1e3 * Quantiles.of(times['cpu']).median:6.1f} ms"
        )

    return "\n".join(
        (
            f"{name}: {mib:.0f} MiB in a transfer",
            line("transfer", transfer),
            line("bare gloo", bare),
            f"  bare / transfer: {Quantiles.of(ratios)}",
        )
    )


def _median(figures: Figures, clock: str) -> float:
    return Quantiles.of(figures["transfer"][clock]).median


def _merged(runs: Sequence[Figures]) -> Figures:
    merged = dict(runs[0])
    for kind in ("transfer", "bare"):
        merged[kind] = {
            clock: [each for figures in runs for each in figures[kind][clock]]
            for clock in ("wall", "cpu")
        }
    return merged


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and return its exit code.

    The code is 0 for success, 1 if the measurement failed, 2 for invalid flags, 130 after Ctrl-C.
    """
    about = "Measure KV transfers between two processes beside bare gloo."
    program, amounts = read_flags(PROGRAM, about, (Program, Amounts), arguments)
    config = dataclasses.asdict(amounts)
    return run(lambda: measure(program, amounts.work), config, program.save_json)


if __name__ == "__main__":
    sys.exit(main())
