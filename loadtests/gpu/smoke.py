"""Compiles all kernels for the device, and compares the result of each with float64.

1. The kernels of all AOT cases (`tests/aot/cases`) are compiled in parallel, which also fills
   Triton's cache for the sections that follow. Violated AOT rules are listed, but do not fail the
   section.
2. Each group of `smoke_cases` runs in a process of its own, in every dtype of the device: bfloat16
   on a GPU; float16 and float32 under Triton's interpreter. Memory that a kernel leaves unwritten
   contains NaN.

A line of JSON is written when a case starts and when it ends. If a process crashes or hangs, its
current case fails, and a new process runs the cases after it.
"""

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed, wait
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.fallback import forbid_fallback
from penstock.kernels.triton_common.launch import DeviceInfo, device_info
from penstock.loadtests.gpu.options import Options, read_options
from penstock.loadtests.gpu.sections import write_figures
from penstock.loadtests.gpu.smoke_cases import EXACT, GROUPS
from penstock.loadtests.gpu.smoke_inputs import Inputs

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS = 130.0  # time limit of the section, in seconds
COMPILE_SECONDS = 60.0  # time limit of compiling; kernels that are not ready by then fail
CASE_SECONDS = 20.0  # seconds after which the process of a case is stopped
INTERPRETED_CASE_SECONDS = 300.0
INTERPRETED_SECONDS = 400.0  # time limit of the section under the interpreter
# Chip for which kernels are compiled on a machine without a GPU.
HOPPER = DeviceInfo("sm_90", shared_bytes=227 << 10)
NUM_COMPILERS = max(1, min(14, (os.cpu_count() or 2) - 1))
NUM_RUNNERS = max(1, min(4, (os.cpu_count() or 2) // 2))
DTYPES = {"cuda": ("bfloat16",), "cpu": ("float16", "float32")}

LIMITS = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Largest norm of the error, relative to the norm of the exact result.

Inputs are exact, sums are in float32, and a result is rounded at most four times (probabilities,
hidden states of experts and heads, the result). Each rounding adds at most half an ulp, and the
limit is four times that.
"""


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the error relative to that of the exact result.

    The result is NaN if either of the tensors has a NaN.
    """
    exact = exact.double()
    error = (found.cpu().double() - exact).norm() / exact.norm()
    return float(error)


def run_group(name: str, inputs: Inputs, skipped: int) -> Iterator[dict[str, Any]]:
    """Run the cases of a group after the first `skipped` ones.

    Yields a line before and after each case.
    """
    limit = 0.0 if name in EXACT else LIMITS[inputs.dtype]
    dtype = str(inputs.dtype).removeprefix("torch.")
    for number, (case, compute) in enumerate(GROUPS[name](inputs)):
        if number < skipped:
            continue
        line: dict[str, Any] = {"case": f"{name}: {case}", "dtype": dtype, "number": number}
        yield line | {"outcome": "started"}
        began = time.monotonic()
        try:
            with forbid_fallback(inputs.device):
                error = relative_error(*compute())
        except Exception as problem:
            line |= {"outcome": "failed", "why": f"{type(problem).__name__}: {problem}"[-500:]}
        else:
            outcome = "passed" if error <= limit else "failed"
            line |= {"outcome": outcome, "error": error, "limit": limit}
        yield line | {"seconds": time.monotonic() - began}


def child(group: str, dtype: str, options: Options, skipped: int) -> int:
    """Run a group in this process and append its lines to the file `options.json`."""
    # This setting fills uninitialized tensors with NaN, including those of launchers.
    torch.use_deterministic_algorithms(True, warn_only=True)
    inputs = Inputs(options.device, getattr(torch, dtype), options.small)
    with options.json.open("a") as file:
        for line in run_group(group, inputs, skipped):
            file.write(json.dumps(line) + "\n")
            file.flush()
    return 0


def watch(
    group: str,
    dtype: str,
    options: Options,
    path: Path,
    ends: float,
    module: str = "penstock.loadtests.gpu.smoke",
) -> None:
    """Run a group in processes until all cases have ended, or until time `ends`.

    The lines are written to `path`. If a process crashes or hangs, its current case is recorded as
    failed, and another process runs the remaining cases.
    """
    skipped = 0
    seconds = CASE_SECONDS if options.device.type == "cuda" else INTERPRETED_CASE_SECONDS
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    if options.device.type == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    while True:
        command = [sys.executable, "-m", module, "--group", group, "--dtype", dtype]
        command += ["--skipped", str(skipped), "--json", str(path), "--device"]
        command += [options.device.type, *(["--small"] if options.small else [])]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        reason, words = _wait(process, path, seconds, ends)
        if not reason:
            return
        lines = read_lines(path)
        nothing: dict[str, Any] = {"number": skipped - 1, "outcome": "none"}
        last = lines[-1] if lines else nothing
        if last["outcome"] != "started":  # the process failed before or after a case
            line = {"case": f"{group}: process", "dtype": dtype, "number": last["number"]}
            _append(path, line | {"outcome": "failed", "why": f"{reason}: {words[-500:]}"})
            return
        _append(path, last | {"outcome": "failed", "why": f"{reason}: {words[-500:]}"})
        skipped = last["number"] + 1
        if time.monotonic() >= ends:
            return


def _wait(
    process: "subprocess.Popen[bytes]", path: Path, seconds: float, ends: float
) -> tuple[str, str]:
    """Wait for a process. Return why it failed ("" if it succeeded) and the end of its stderr."""
    size, changed = -1, time.monotonic()
    while True:
        try:
            _, words = process.communicate(timeout=0.5)
            code = process.returncode
            return (f"exited with code {code}" if code else ""), words.decode(errors="replace")
        except subprocess.TimeoutExpired:
            now, new = time.monotonic(), path.stat().st_size if path.exists() else 0
            if new != size:
                size, changed = new, now
            if now - changed < seconds and now < ends:
                continue
            process.kill()
            _, words = process.communicate()
            why = "stopped: no time left" if now >= ends else f"hung for {seconds:.0f} s"
            return why, words.decode(errors="replace")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a file, or [] if the file does not exist."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def _append(path: Path, line: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def compile_case(module: str, index: int, chip: DeviceInfo) -> list[dict[str, Any]]:
    """Compile the kernels of an AOT case for a chip and return one line per kernel."""
    jobs = importlib.import_module("tests.aot.jobs")
    return [asdict(report) for report in jobs.reports(jobs.Job(module, index, chip))]


def compile_all(chip: DeviceInfo, names: Sequence[str], ends: float) -> Iterator[dict[str, Any]]:
    """Compile the AOT cases in modules `names` until time `ends` and yield a line per kernel.

    Cases that need units of other chips are left out.
    """
    jobs = [
        (module, index)
        for module in (f"tests.aot.cases.{name}" for name in names)
        for index, case in enumerate(importlib.import_module(module).aot_cases())
        if case.supports(chip)
    ]
    # The child processes must compile kernels instead of interpreting them.
    os.environ.pop("TRITON_INTERPRET", None)
    pool = ProcessPoolExecutor(NUM_COMPILERS, get_context("spawn"))
    futures = {pool.submit(compile_case, *job, chip): job for job in jobs}
    try:
        for future in as_completed(futures, max(0.0, ends - time.monotonic())):
            try:
                yield from future.result()
            except Exception as error:  # the compiler may crash, for example
                case = f"{futures[future][0]}, case {futures[future][1]}"
                why = f"does not compile: {type(error).__name__}: {error}"
                yield {"kernel": "?", "case": case, "complaints": [why]}
    except TimeoutError:
        left = sum(not future.done() for future in futures)
        why = "not compiled: no time left"
        yield {"kernel": "?", "case": f"{left} cases", "complaints": [why]}
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def figures_of(compiled: Sequence[dict[str, Any]], paths: Sequence[Path]) -> dict[str, Any]:
    """Return the results so far as JSON values; `failures` has failed cases and compilations."""
    cases = [line for path in paths for line in read_lines(path) if line["outcome"] != "started"]
    complaints = [
        f"{line['kernel']} ({line['case']}): {complaint}"
        for line in compiled
        for complaint in line["complaints"]
    ]
    failures = [
        f"{line['case']}, {line['dtype']}: {line.get('why') or _too_wrong(line)}"
        for line in cases
        if line["outcome"] != "passed"
    ]
    failures += [each for each in complaints if "not compile" in each]
    if not any(line["outcome"] == "passed" for line in cases):
        failures.append("no case passed")
    return {
        "cases": cases,
        "compiled": len(compiled),
        "complaints": complaints,
        "failures": failures,
    }


def _too_wrong(line: dict[str, Any]) -> str:
    return f"relative error {line['error']:.1e}, at most {line['limit']:.1e} expected"


def measure(options: Options, ends: float) -> Iterator[dict[str, Any]]:
    """Compile and run all cases until time `ends` (of `time.monotonic`).

    Yields the results so far.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        compiled: list[dict[str, Any]] = []
        names = sorted(path.stem for path in (ROOT / "tests" / "aot" / "cases").glob("*.py"))
        chip = HOPPER
        if options.device.type == "cuda":
            chip = device_info(torch.empty(0, device=options.device))
        until = min(ends, time.monotonic() + COMPILE_SECONDS)
        for line in compile_all(chip, names[-1:] if options.small else names, until):
            compiled.append(line)
            _append(folder / "smoke-compiled.jsonl", line)
            yield figures_of(compiled, [])
        paths = {
            (group, dtype): folder / f"smoke-{group}-{dtype}.jsonl"
            for group in GROUPS
            for dtype in DTYPES[options.device.type]
        }
        with ThreadPoolExecutor(NUM_RUNNERS) as pool:
            runs = [pool.submit(watch, *key, options, path, ends) for key, path in paths.items()]
            while not all(run.done() for run in runs):
                wait(runs, timeout=1.0)
                yield figures_of(compiled, list(paths.values()))
        for run in runs:
            run.result()
        yield figures_of(compiled, list(paths.values()))


def main() -> int:
    ends = time.monotonic() + SECONDS
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--group", choices=GROUPS)
    parser.add_argument("--dtype")
    parser.add_argument("--skipped", type=int, default=0)
    own, others = parser.parse_known_args()
    options = read_options("smoke", others)
    if own.group:
        return child(own.group, own.dtype, options, own.skipped)
    if options.device.type == "cpu":
        ends += INTERPRETED_SECONDS - SECONDS
    for figures in measure(options, ends):
        write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
