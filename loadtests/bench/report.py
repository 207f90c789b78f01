"""Formats the results of a load as text and JSON like `vllm bench serve`."""

import math
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from penstock.loadtests.bench.metrics import Figures, Outcome, Summary

_WIDTH = 50
_SECTIONS = (
    ("ttft", "TTFT", "Time to First Token"),
    ("tpot", "TPOT", "Time per Output Token (excl. 1st token)"),
    ("itl", "ITL", "Inter-token Latency"),
)


def block(figures: Figures, rate: float = math.inf, concurrency: int | None = None) -> str:
    """Return the results as text with the labels, widths and order of `vllm bench serve`.

    `rate` (requests per second) is shown only if it is finite, and `concurrency` only if it is not
    None.
    """
    return "\n".join(_lines(figures, rate, concurrency))


def _lines(figures: Figures, rate: float, concurrency: int | None) -> Iterator[str]:
    yield f"{' Serving Benchmark Result ':=^{_WIDTH}}"
    yield _line("Successful requests:", figures.completed)
    yield _line("Failed requests:", figures.failed)
    if concurrency is not None:
        yield _line("Maximum request concurrency:", concurrency)
    if not math.isinf(rate):
        yield _line("Request rate configured (RPS):", rate)
    yield _line("Benchmark duration (s):", figures.duration)
    yield _line("Total input tokens:", figures.total_input)
    yield _line("Total generated tokens:", figures.total_output)
    yield _line("Request throughput (req/s):", figures.per_second(figures.completed))
    if figures.good is not None:
        yield _line("Request goodput (req/s):", figures.per_second(figures.good))
    yield _line("Output token throughput (tok/s):", figures.per_second(figures.total_output))
    yield _line("Peak output token throughput (tok/s):", figures.peak_output)
    yield _line("Peak concurrent requests:", float(figures.peak_concurrent))
    total = figures.total_input + figures.total_output
    yield _line("Total token throughput (tok/s):", figures.per_second(total))
    for attribute, name, title in _SECTIONS:
        summary: Summary = getattr(figures, attribute)
        yield f"{title:-^{_WIDTH}}"
        yield _line(f"Mean {name} (ms):", summary.mean)
        yield _line(f"Median {name} (ms):", summary.median)
        yield _line(f"P99 {name} (ms):", summary.p99)
    yield "=" * _WIDTH


def _line(label: str, value: float) -> str:
    shown = f"{value:<10}" if isinstance(value, int) else f"{value:<10.2f}"
    return f"{label:<40} {shown}"


def as_json(figures: Figures, config: dict[str, Any]) -> dict[str, Any]:
    """Return the results, options and machine under the JSON names of `vllm bench serve`.

    Values of keys that end in `_ms` are in milliseconds, `duration` is in seconds, and throughputs
    are per second.
    """
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": config,
        "machine": machine(),
        "duration": figures.duration,
        "completed": figures.completed,
        "failed": figures.failed,
        "short_answers": figures.short,
        "total_input_tokens": figures.total_input,
        "total_output_tokens": figures.total_output,
        "request_throughput": figures.per_second(figures.completed),
        "request_goodput": None if figures.good is None else figures.per_second(figures.good),
        "output_throughput": figures.per_second(figures.total_output),
        "total_token_throughput": figures.per_second(figures.total_input + figures.total_output),
        "max_output_tokens_per_s": figures.peak_output,
        "max_concurrent_requests": figures.peak_concurrent,
    }
    for name in ("ttft", "tpot", "itl", "e2el", "lag"):
        summary: Summary = getattr(figures, name)
        for statistic in ("mean", "median", "std", "p90", "p99"):
            result[f"{statistic}_{name}_ms"] = getattr(summary, statistic)
    return result


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return one record of measurements per request.

    All times are in seconds; `due` and `start` are relative to the start of the load.
    """
    return [
        {
            "number": outcome.number,
            "due": outcome.due,
            "start": outcome.start,
            "input_len": outcome.input_len,
            "output_len": outcome.output_len,
            "ttft": outcome.ttft if outcome.arrivals else None,
            "latency": outcome.latency if outcome.arrivals else None,
            "itls": outcome.gaps,
            "error": outcome.error,
        }
        for outcome in outcomes
    ]


def machine() -> dict[str, Any]:
    """Describe the machine on which this client runs."""
    return {
        "cpu": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """Return the git commit of this tree, with `+` if it has local changes; "" without git."""
    folder = Path(__file__).resolve().parent
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=7", "--dirty=+"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()
