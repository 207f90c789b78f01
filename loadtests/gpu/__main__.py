"""GPU tests and benchmarks: `make gpu`, or `python -m penstock.loadtests.gpu`.

The run takes less than ten minutes and does not need Ray. Its sections measure the device's limits,
run a KV transfer between two processes and the kernel tests, time every operation against other
implementations, time decode steps of the engine, and measure the cost of deterministic mode.

The run fails if a section fails, or if a fallback was used instead of a kernel. A missed
performance goal is not a failure.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.loadtests.gpu import kernel_tests
from penstock.loadtests.gpu.models import SHAPES
from penstock.loadtests.gpu.sections import Outcome, Section, run_section
from penstock.loadtests.gpu.table import report

ALL_SECONDS = 590.0
BOUNDS = "bounds"


def sections(bounds: Path, device: str, small: bool) -> list[Section]:
    """Return all sections in order; the sum of their time limits is at most ALL_SECONDS."""
    common = ("--device", device, "--bounds", str(bounds), *(["--small"] if small else []))

    def section(name: str, module: str, seconds: float, *others: str) -> Section:
        return Section(name, f"penstock.loadtests.gpu.{module}", seconds, (*common, *others))

    engine_seconds = {"1b": 55.0, "8b": 85.0, "moe": 65.0}
    return [
        section(BOUNDS, "bounds", 35),
        section("KV transfer of two processes", "kv_transfer", 40),
        section("tests of kernels", "kernel_tests", kernel_tests.SECONDS),
        section("operations", "operations", 110),
        *(
            section(f"engine, {name}", "steps", engine_seconds[name], "--model", name)
            for name in SHAPES
        ),
        section("deterministic, 1b", "deterministic", 50, "--model", "1b"),
    ]


def run(
    wanted: Sequence[str], device: str, small: bool, seconds: float = ALL_SECONDS
) -> Iterator[Outcome]:
    """Run sections and yield their outcomes.

    A section runs if its name starts with an entry of `wanted`, or if `wanted` is empty. The bounds
    section always runs, because other sections use its results.
    """
    ends = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as folder:
        bounds = Path(folder) / "bounds.json"
        for section in sections(bounds, device, small):
            chosen = not wanted or section.name.startswith(tuple(wanted))
            if not chosen and section.name != BOUNDS:
                continue
            print(f"{section.name} ...", file=sys.stderr, flush=True)
            outcome = run_section(section, ends - time.monotonic())
            if section.name == BOUNDS and outcome.figures:
                bounds.write_text(json.dumps(outcome.figures))
            yield outcome


def triton_version() -> str:
    """Return the version of Triton, or "none" if it is not installed."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def about(device: str) -> dict[str, Any]:
    """Return the date, the device and the software versions of this run."""
    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "penstock": penstock.__version__,
        "torch": torch.__version__,
        "triton": triton_version(),
        "device": device,
    }
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, 1 (a section failed) or 2 (no CUDA device)."""
    program = "python -m penstock.loadtests.gpu"
    parser = argparse.ArgumentParser(prog=program, description="GPU tests and benchmarks.")
    parser.add_argument("sections", nargs="*", help="section names or prefixes; default: all")
    parser.add_argument("--save-json", type=Path, default=Path("build/gpu.json"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to test the command")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print(f"{program}: torch finds no CUDA device; see --device", file=sys.stderr)
        return 2
    outcomes: list[Outcome] = []
    for outcome in run(given.sections, given.device, given.small):
        outcomes.append(outcome)
        _save(given.save_json, about(given.device), outcomes)  # saved in case a later one fails
    print(report(outcomes))
    print(f"figures: {given.save_json}")
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def _save(path: Path, on: dict[str, Any], outcomes: Sequence[Outcome]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {
        outcome.name: {
            "passed": outcome.passed,
            "seconds": outcome.seconds,
            "failures": outcome.failures,
            **{key: value for key, value in outcome.figures.items() if key != "failures"},
        }
        for outcome in outcomes
    }
    path.write_text(json.dumps({"about": on, "sections": found}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
