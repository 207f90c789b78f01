"""Two things measured in turns, A B A B, so that what else the machine does touches both alike."""

import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

import penstock
from penstock.loadtests.bench.flags import option
from penstock.loadtests.bench.metrics import Outcome
from penstock.loadtests.bench.report import machine
from penstock.loadtests.micro.server import ServerFailed

SHIPPED_MODEL = Path(penstock.__file__).parent / "models" / "demo"


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """What is compared."""

    model: str = option("", "checkpoint folder; by default the model that ships")
    threads: int = option(1, "of the engine called directly, and of each worker")
    save_json: str = option("", "write what was measured to this file")

    def serve_arguments(self) -> list[str]:
        """Arguments of `penstock serve` for the same model and threads."""
        return [str(self.model_folder), "--threads", str(self.threads)]

    @property
    def model_folder(self) -> Path:
        return Path(self.model) if self.model else SHIPPED_MODEL


class MeasurementFailed(RuntimeError):
    """There is nothing to compare; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Quantiles:
    """The middle of some values, and where most of them lie."""

    median: float
    low: float  # the 10th percentile
    high: float  # the 90th percentile
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quantiles":
        low, median, high = np.percentile(values, [10, 50, 90])
        return cls(float(median), float(low), float(high), len(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} (80% of {self.count}: {self.low:.3g} to {self.high:.3g})"


def checked(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    """The same outcomes. Raises MeasurementFailed if a request failed."""
    failed = [outcome.error for outcome in outcomes if outcome.error]
    if failed:
        raise MeasurementFailed(f"{len(failed)} of {len(outcomes)} requests failed: {failed[0]}")
    return outcomes


def steady_rate(outcomes: Sequence[Outcome]) -> float:
    """Tokens a second while every one of these requests was decoding.

    From the last one's second message (not counted: the first comes of the prefill) to the first
    one's last (counted). Raises MeasurementFailed when there is no such time, or a request failed.
    """
    checked(outcomes)
    begin = max(outcome.arrivals[:2][-1] for outcome in outcomes)
    end = min(outcome.arrivals[-1] for outcome in outcomes)
    if begin >= end:
        raise MeasurementFailed("the requests were never all decoding: ask for longer answers")
    tokens = sum(
        count
        for outcome in outcomes
        for at, count in zip(outcome.arrivals, outcome.tokens_per_message(), strict=True)
        if begin < at <= end
    )
    return tokens / (end - begin)


def whole_rate(outcomes: Sequence[Outcome]) -> float:
    """Tokens a second from the first request's start to the last token: prefill and all."""
    checked(outcomes)
    begin = min(outcome.start for outcome in outcomes)
    end = max(outcome.arrivals[-1] for outcome in outcomes)
    return sum(outcome.output_len for outcome in outcomes) / (end - begin)


def run(
    measure: Callable[[], Coroutine[Any, Any, dict[str, Any]]], config: Any, save_json: str
) -> int:
    """Measure, save, and return the exit code. The figures are what `measure` returns."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            figures = runner.run(measure())
        result = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "config": config,
            "machine": machine(),
            **figures,
        }
        if save_json:
            Path(save_json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except (MeasurementFailed, ServerFailed, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0
