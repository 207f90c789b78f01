"""Helpers for A/B benchmarks.

The two variants alternate (A B A B), so that other load on the machine affects both variants
equally.
"""

import asyncio
import dataclasses
import json
import os
import signal
import sys
import threading
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
from penstock.loadtests.micro.source_tree import ProgramFailed

SHIPPED_MODEL = Path(penstock.__file__).parent / "models" / "demo"


@dataclasses.dataclass(frozen=True, slots=True)
class Setup:
    """The model, the number of threads, and the output file."""

    model: str = option("", "checkpoint folder; default: the bundled model")
    threads: int = option(1, "threads of the directly called engine and of each worker")
    default_threads: bool = option(
        False, "let `penstock serve` choose the threads instead; the engine uses all cores"
    )
    save_json: str = option("", "write the results to this file")

    def serve_arguments(self) -> list[str]:
        """Return the arguments of `penstock serve` for this model and number of threads."""
        model = str(self.model_folder)
        return [model] if self.default_threads else [model, "--threads", str(self.threads)]

    @property
    def engine_threads(self) -> int:
        """Return the number of threads of an engine that is called directly."""
        return len(os.sched_getaffinity(0)) if self.default_threads else self.threads

    @property
    def model_folder(self) -> Path:
        return Path(self.model) if self.model else SHIPPED_MODEL


class MeasurementFailed(RuntimeError):
    """Raised if the measurement gave no valid result. The message gives the reason."""


class NeverAllDecoding(MeasurementFailed):
    """Raised if the requests never all decoded at the same time."""

    def __init__(self) -> None:
        super().__init__("the requests never all decoded at the same time: request longer answers")


@dataclasses.dataclass(frozen=True, slots=True)
class Quantiles:
    """Median, 10th and 90th percentile of a set of values."""

    median: float
    low: float  # the 10th percentile of the values
    high: float  # the 90th percentile of the values
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Quantiles":
        low, median, high = np.percentile(values, [10, 50, 90])
        return cls(float(median), float(low), float(high), len(values))

    def __str__(self) -> str:
        return f"{self.median:.3g} (80% of {self.count}: {self.low:.3g} to {self.high:.3g})"


def checked(outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
    """Return `outcomes` unchanged. Raises MeasurementFailed if a request failed."""
    failed = [outcome.error for outcome in outcomes if outcome.error]
    if failed:
        raise MeasurementFailed(f"{len(failed)} of {len(outcomes)} requests failed: {failed[0]}")
    return outcomes


def steady_rate(outcomes: Sequence[Outcome]) -> float:
    """Return the tokens per second while all of these requests were decoding.

    The interval starts when each request has received at least two messages, because the first
    message contains the results of prefill. It ends when the first request receives its last
    message.

    Raises:
        MeasurementFailed: a request failed.
        NeverAllDecoding: there is no such interval.
    """
    checked(outcomes)
    begin = max(outcome.arrivals[:2][-1] for outcome in outcomes)
    end = min(outcome.arrivals[-1] for outcome in outcomes)
    if begin >= end:
        raise NeverAllDecoding
    tokens = sum(
        count
        for outcome in outcomes
        for at, count in zip(outcome.arrivals, outcome.tokens_per_message(), strict=True)
        if begin < at <= end
    )
    return tokens / (end - begin)


def whole_rate(outcomes: Sequence[Outcome]) -> float:
    """Return the tokens per second from the start of the first request to the last token."""
    checked(outcomes)
    begin = min(outcome.start for outcome in outcomes)
    end = max(outcome.arrivals[-1] for outcome in outcomes)
    return sum(outcome.output_len for outcome in outcomes) / (end - begin)


def run(
    measure: Callable[[], Coroutine[Any, Any, dict[str, Any]]], config: Any, save_json: str
) -> int:
    """Run `measure`, write its results to `save_json` unless empty, and return the exit code.

    The exit code is 0 for success, 1 if the measurement failed (the reason is printed), 130
    after Ctrl-C, or 143 after SIGTERM. Both signals cancel `measure`, so that it ends its servers.
    """
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            figures = runner.run(_until_sigterm(measure))
        result = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "config": config,
            "machine": machine(),
            **figures,
        }
        if save_json:
            Path(save_json).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except (MeasurementFailed, ProgramFailed, ServerFailed, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except asyncio.CancelledError:
        return 143
    return 0


async def _until_sigterm(
    measure: Callable[[], Coroutine[Any, Any, dict[str, Any]]],
) -> dict[str, Any]:
    """Return the results of `measure`. SIGTERM cancels it once; further ones are ignored.

    A handler of its own is needed: in the background of a shell script, SIGINT is ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return await measure()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        loop.add_signal_handler(signal.SIGTERM, lambda: None)
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, cancel)
    try:
        return await measure()
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
