"""Compares the performance of two source trees: the current one and another checkout.

`python -m penstock.loadtests.micro.regression_check --against DIR` measures both trees in turns
(other, current, other, current, ...) on one machine. Each figure has one value per tree and round:

- The ratio now / then compares the values of both trees in one round.
- The ratio within a tree compares the values of consecutive rounds of one tree, in both orders.
  These ratios show how much a figure varies without a change of the code.

A figure changed if its median ratio now / then is outside the 10-90% range of the ratios within a
tree.
"""

import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from penstock.loadtests.micro.ab_runner import Quantiles
from penstock.loadtests.micro.source_tree import SourceTree
from penstock.loadtests.micro.tree_figures import Figures


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Description of a figure."""

    about: str
    higher_is_better: bool


KINDS = {
    "decode": Kind("decode of 16 sequences in the engine / matmul (FLOP/s)", True),
    "prefill": Kind("prompt of 1,024 tokens in the engine / matmul (FLOP/s)", True),
    "scheduler": Kind("numpy work / batcher step of 256 sequences (CPU time)", True),
    "path": Kind("decode of 16 requests through `penstock serve` (tokens/s)", True),
    "router_http": Kind("CPU time of the router per token over HTTP (µs)", False),
    "router_grpc": Kind("CPU time of the router per token over gRPC (µs)", False),
    "transfer": Kind("CPU time of both workers per MB of KV transfers (ms)", False),
    "start": Kind("later start of `penstock serve` until the first answer (s)", False),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison:
    """One figure of both trees. `then` and `now` have one value per round."""

    name: str
    then: Sequence[float]
    now: Sequence[float]

    @property
    def ratio(self) -> Quantiles:
        """Ratio of the current tree's value to the other tree's (now / then), for each round."""
        return Quantiles.of([now / then for then, now in zip(self.then, self.now, strict=True)])

    @property
    def within_tree(self) -> Quantiles:
        """Ratios of consecutive rounds a and b of the same tree: both a / b and b / a."""
        pairs = [*itertools.pairwise(self.then), *itertools.pairwise(self.now)]
        return Quantiles.of([ratio for a, b in pairs for ratio in (a / b, b / a)])

    @property
    def verdict(self) -> str:
        """Whether the current tree is `same`, `better` or `worse` than the other one."""
        median, within = self.ratio.median, self.within_tree
        if within.low <= median <= within.high:
            return "same"
        return "better" if (median > 1) == KINDS[self.name].higher_is_better else "worse"

    def __str__(self) -> str:
        within = self.within_tree
        then, now = Quantiles.of(self.then).median, Quantiles.of(self.now).median
        return (
            f"{self.verdict:<6} {self.name:<11} now/then {self.ratio}; "
            f"within a tree {within.low:.3g} to {within.high:.3g}\n"
            f"       {KINDS[self.name].about}: {then:.4g} -> {now:.4g}"
        )

    def figures(self) -> dict[str, Any]:
        return {
            "then": list(self.then),
            "now": list(self.now),
            "ratio": dataclasses.asdict(self.ratio),
            "within_tree": dataclasses.asdict(self.within_tree),
            "verdict": self.verdict,
        }


async def compare_trees(
    then: SourceTree,
    now: SourceTree,
    rounds: int,
    measure: Callable[[SourceTree], Awaitable[Figures]],
    report: Callable[[str], None],
) -> list[Comparison]:
    """Measure both trees in turns, after one warm-up round, and compare their figures.

    Args:
        measure: measures one tree once.
        report: called with a line of text before each measurement.
    """
    values: dict[str, list[Figures]] = {"then": [], "now": []}
    for round_number in range(rounds + 1):
        for side, tree in (("then", then), ("now", now)):
            name = f"round {round_number} of {rounds}" if round_number else "warm-up"
            report(f"{name}: {tree.root}")
            figures = await measure(tree)
            # The first round is a warm-up, which fills the caches of compiled kernels.
            if round_number:
                values[side].append(figures)
    return [
        Comparison(name, *([each[name] for each in values[side]] for side in ("then", "now")))
        for name in KINDS
    ]
