"""GPU tests and benchmarks: `make gpu`, or `python -m penstock.loadtests.gpu`.

The run does not need Ray. Its sections measure the device's limits, compute every kernel once, and
run the kernel tests and a KV transfer between two processes. Other sections time decode steps of
the engine, and every operation beside other implementations. They also replay loads against the
engine and a plain torch engine, measure the cost of deterministic mode, and run an engine on two
GPUs.

The sections are grouped in stages, each of which takes less than eight minutes. `make gpu ARGS=1`
runs the first stage. Without arguments, all stages run. A run writes one JSON file with its
results, and an archive with that file, the report and the files of the sections. With `--keep`, a
run adds its sections to the results of earlier runs.

Sections that run after "tuning" use the tuned tiles. With `--keep`, these may be from an earlier
run.

The run fails if a section fails, or if a fallback was used instead of a kernel. A missed
performance goal is not a failure.
"""

import argparse
import json
import os
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.kernels.triton_common.tuned_tiles import VARIABLE
from penstock.loadtests.gpu import kernel_tests, tuning
from penstock.loadtests.gpu.sections import Outcome, Section, read_figures, run_section
from penstock.loadtests.gpu.table import report

STAGE_SECONDS = 465.0  # the rest of the eight minutes is for the start of processes
REPORT = "report.txt"
CPU_FACTOR = 3.0  # factor of the time limits on a CPU, where a run only tests the command
BOUNDS, TUNING = "bounds", "tuning"
LINE_FILES = {
    "smoke": "smoke-*.jsonl",
    "tests of kernels": kernel_tests.LINES,
    TUNING: "tuning-*.jsonl",
}
"""Patterns of the files to which a section appends. Files of an earlier run are removed first."""


def stages(folder: Path, device: str, small: bool) -> dict[str, list[Section]]:
    """Return the sections of each stage, by the name of the stage.

    The sum of the time limits of a stage and of the bounds section is at most STAGE_SECONDS.
    """
    files = ("--bounds", str(folder / "bounds.json"), "--folder", str(folder))
    common = ("--device", device, *files, *(["--small"] if small else []))

    def section(name: str, module: str, seconds: float, *others: str) -> Section:
        limit = seconds if device == "cuda" else CPU_FACTOR * seconds
        return Section(name, f"penstock.loadtests.gpu.{module}", limit, (*common, *others))

    def engine(name: str, seconds: float) -> Section:
        return section(f"engine, {name}", "steps", seconds, "--model", name)

    return {
        "1": [
            section(BOUNDS, "bounds", 35),
            section("smoke", "smoke", 140),
            section("tests of kernels", "kernel_tests", kernel_tests.SECONDS),
            section("KV transfer of processes", "kv_transfer", 75),
        ],
        "2": [
            section(TUNING, "tuning", 120),
            section("operations", "operations", 170),
            section("beside torch, 8b", "beside_torch", 140, "--model", "8b"),
        ],
        "3": [
            engine("8b", 110),
            engine("moe", 80),
            engine("1b", 80),
            section("deterministic, 1b", "deterministic", 80, "--model", "1b"),
            section("two ranks, 1b", "two_ranks", 80, "--model", "1b"),
        ],
    }


def chosen_sections(wanted: Sequence[str], by_stage: dict[str, list[Section]]) -> list[Section]:
    """Return the sections that `wanted` names, by stage or by a prefix of the section's name.

    An empty list means all sections. The bounds section is always chosen, because other sections
    use its results.
    """
    return [
        section
        for stage, sections in by_stage.items()
        for section in sections
        if not wanted
        or stage in wanted
        or section.name == BOUNDS
        or section.name.startswith(tuple(wanted))
    ]


def run(wanted: Sequence[str], device: str, small: bool, folder: Path) -> Iterator[Outcome]:
    """Run sections and yield their outcomes. The sections write further files to `folder`.

    Each section uses the tuned tiles that are in `folder` when it starts, unless the environment
    names others.
    """
    tiles = folder / tuning.FOLDER
    tiles.mkdir(exist_ok=True)
    sections = chosen_sections(wanted, stages(folder, device, small))
    ends = time.monotonic() + sum(section.seconds for section in sections)
    for section in sections:
        print(f"{section.name} ...", file=sys.stderr, flush=True)
        if section.name in LINE_FILES:
            for earlier in folder.glob(LINE_FILES[section.name]):
                earlier.unlink()
        used = os.environ.get(VARIABLE, str(tiles))
        is_tuned = bool(used) and any(_has_tiles(file) for file in Path(used).glob("*.json"))
        environment = {VARIABLE: used}
        outcome = run_section(replace(section, environment=environment), ends - time.monotonic())
        if section.name == BOUNDS and outcome.figures:
            (folder / "bounds.json").write_text(json.dumps(outcome.figures))
        outcome.figures["uses_tuned_tiles"] = is_tuned and section.name != TUNING
        yield outcome


def _has_tiles(file: Path) -> bool:
    """Return True if a file of tuned tiles has an entry.

    It has no entry if no candidate was faster than the default.
    """
    return bool(read_figures(file).get("tiles"))


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
    """Run the command and return its exit code.

    The code is 0 for success, 1 if a section failed, 2 without a CUDA device.
    """
    program = "python -m penstock.loadtests.gpu"
    parser = argparse.ArgumentParser(prog=program, description="GPU tests and benchmarks.")
    parser.add_argument(
        "sections", nargs="*", help="stages, section names or prefixes of names; default: all"
    )
    parser.add_argument("--save-json", type=Path, default=Path("build/gpu.json"))
    parser.add_argument(
        "--keep", action="store_true", help="keep the results of other sections in the file"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny sizes, to test the command")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print(f"{program}: torch finds no CUDA device; see --device", file=sys.stderr)
        return 2
    archive = given.save_json.with_suffix(".tar.gz")
    with tempfile.TemporaryDirectory(prefix="penstock-gpu-") as temporary:
        folder, on = Path(temporary), about(given.device)
        try:
            kept = _kept(given.save_json, on, archive, folder) if given.keep else {}
        except ValueError as error:
            print(f"{program}: --keep: {error}", file=sys.stderr)
            return 2
        outcomes: dict[str, Outcome] = {}
        for outcome in run(given.sections, given.device, given.small, folder):
            outcomes[outcome.name] = outcome
            # The results are saved after each section, in case a later section fails.
            together = list({**kept, **outcomes}.values())
            _save(given.save_json, on, together)
            (folder / REPORT).write_text(report(together, on, given.small) + "\n")
            _write_archive(archive, folder, given.save_json)
    print(report(list(outcomes.values()), on, given.small))
    print(f"figures: {given.save_json}; all files: {archive}")
    return 0 if all(outcome.passed for outcome in outcomes.values()) else 1


def _kept(path: Path, on: dict[str, Any], archive: Path, folder: Path) -> dict[str, Outcome]:
    """Return an earlier run's outcomes and extract its files to `folder`.

    The result is {} if there is no earlier run.

    Raises:
        ValueError: the earlier run was on another device, or with other software.
    """
    found = read_figures(path)
    if not found:
        return {}
    for name, value in on.items():
        if name != "date" and found["about"].get(name) != value:
            was = found["about"].get(name)
            raise ValueError(
                f"{path} has results measured with another {name}: {was!r} in the file, {value!r} "
                "now; give another file"
            )
    if archive.exists():
        with tarfile.open(archive) as earlier:
            earlier.extractall(folder, filter="data")
    (folder / path.name).unlink(missing_ok=True)  # the new archive gets the new JSON file
    common = ("passed", "seconds", "failures")
    return {
        name: Outcome(
            name,
            each["seconds"],
            each["failures"],
            {key: value for key, value in each.items() if key not in common},
        )
        for name, each in found["sections"].items()
    }


def _write_archive(path: Path, folder: Path, figures: Path) -> None:
    """Write an archive of the files in `folder` and of `figures`. An older archive is replaced."""
    part = path.with_suffix(".part")
    with tarfile.open(part, "w:gz") as archive:
        archive.add(figures, figures.name)
        for file in sorted(folder.iterdir()):
            archive.add(file, file.name)
    part.replace(path)


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
    part = path.with_suffix(".json.part")
    part.write_text(json.dumps({"about": on, "sections": found}, indent=1) + "\n")
    part.replace(path)  # atomic: if the run is killed, the old or the new results remain


if __name__ == "__main__":
    sys.exit(main())
