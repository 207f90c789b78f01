"""Sweeps tile sizes of kernels for the shapes of the models, and writes the file of tuned tiles.

1. Child processes run each candidate once, in parallel, and compare its result with that of the
   default tiles. This also compiles the kernels. A candidate is left out if it does not compile,
   needs too much shared memory, hangs, or computes a different result.
2. This process times the remaining candidates. Then it times the best candidate and the default
   alternately.

The file contains the candidates that are at least LEAST_GAIN times as fast as the default. Sections
that run after this one use the file (see `kernels/triton_common/tuned_tiles`).
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.kernels.fallback import forbid_fallback
from penstock.kernels.triton_common.launch import device_info
from penstock.kernels.triton_common.tuned_tiles import KERNELS, VARIABLE, file_name, trial_tiles
from penstock.loadtests.gpu.clock import Call, time_calls
from penstock.loadtests.gpu.options import Options, read_options
from penstock.loadtests.gpu.sections import write_figures
from penstock.loadtests.gpu.smoke import (
    LIMITS,
    NUM_COMPILERS,
    read_lines,
    relative_error,
    watch,
)
from penstock.loadtests.gpu.tuning_problems import Candidate, Problem, all_problems

MODULE = "penstock.loadtests.gpu.tuning"
SECONDS = 115.0  # time limit of the section in seconds, less a margin for writing the results
INTERPRETED_SECONDS = 340.0
CHECKED_FRACTION = 0.6  # fraction of SECONDS that the child processes get
NUM_CHILDREN = 2  # number of child processes per problem
SWEEP_ROUNDS, SWEEP_SECONDS = 3, 0.005  # rounds per candidate, and seconds per round
NUM_PAIRS = 3  # number of alternating measurements of the best candidate and the default
LEAST_GAIN = 1.03
FOLDER = "tiles"  # subfolder of the results that gets the file of tuned tiles


def check_candidates(
    problem: Problem, index: int, num_children: int, skipped: int
) -> Iterator[dict[str, Any]]:
    """Run every `num_children`-th candidate from `index` on, without the first `skipped` ones.

    Yields a line before and after each candidate, as in `smoke.run_group`.
    """
    candidates = problem.candidates[index::num_children]
    call = problem.check()
    exact = _result(call)
    for number, candidate in enumerate(candidates):
        if number < skipped:
            continue
        line = {"case": problem.name, "number": number, "candidate": candidate}
        yield line | {"outcome": "started"}
        try:
            with trial_tiles(problem.kernel, candidate):
                error = relative_error(_result(problem.check()), exact)
        except Exception as reason:  # Triton's errors have no common base class
            line |= {"outcome": "failed", "why": f"{type(reason).__name__}: {reason}"[-300:]}
        else:
            line |= {"outcome": "passed", "error": error}
            if not error <= 2 * LIMITS[exact.dtype]:  # also true for NaN
                line |= {"outcome": "failed", "why": f"relative error {error:.1e}"}
        yield line


def _result(call: Call) -> torch.Tensor:
    result = call()
    assert isinstance(result, torch.Tensor)
    return result.cpu()


def child(group: str, options: Options, skipped: int) -> int:
    """Check candidates in this process and append lines to the file `options.json`.

    `group` contains the problem's name, the first candidate and the step between candidates.
    """
    name, index, num_children = group.split("#")
    problems = all_problems(options.device, dtype_of(options), options.small)
    problem = next(each for each in problems if each.name == name)
    with options.json.open("a") as file:
        for line in check_candidates(problem, int(index), int(num_children), skipped):
            file.write(json.dumps(line) + "\n")
            file.flush()
    return 0


def check_all(
    problems: Sequence[Problem], options: Options, folder: Path, ends: float
) -> dict[str, list[dict[str, Any]]]:
    """Check all candidates in child processes until time `ends` and return lines by problem."""
    num_children = 1 if options.small else NUM_CHILDREN
    paths = {
        f"{problem.name}#{index}#{num_children}": folder / f"tuning-{number}-{index}.jsonl"
        for number, problem in enumerate(problems)
        for index in range(num_children)
    }
    dtype = str(dtype_of(options)).removeprefix("torch.")
    with ThreadPoolExecutor(NUM_COMPILERS) as pool:
        runs = [
            pool.submit(watch, group, dtype, options, path, ends, MODULE)
            for group, path in paths.items()
        ]
        wait(runs)
    for run in runs:
        run.result()
    lines: dict[str, list[dict[str, Any]]] = {problem.name: [] for problem in problems}
    for group, path in paths.items():
        found = [line for line in read_lines(path) if line["outcome"] != "started"]
        lines[group.partition("#")[0]] += found
    return lines


def sweep(
    problem: Problem, candidates: Sequence[Candidate], device: torch.device, ends: float
) -> dict[str, Any]:
    """Time candidates until time `ends` and return the figures of the best one.

    The speed of a candidate is relative to that of the default: the geometric mean over the
    workloads.
    """

    def seconds_of(candidate: Candidate, rounds: int, seconds: float) -> dict[str, float]:
        found = {}
        for name, make in problem.workloads.items():
            with trial_tiles(problem.kernel, candidate):
                # `make` must run with the candidate's tiles, because the plan that it makes keeps
                # its tiles.
                found[name] = time_calls([make()], device, rounds, seconds).median
        return found

    default = problem.candidates[0]
    base = seconds_of(default, SWEEP_ROUNDS, SWEEP_SECONDS)
    timed: list[tuple[float, Candidate]] = []
    for candidate in candidates:
        if time.monotonic() >= ends:
            break
        if candidate != default:
            found = seconds_of(candidate, SWEEP_ROUNDS, SWEEP_SECONDS)
            timed.append((_gain(base, found), candidate))
    best = max(timed, key=lambda pair: pair[0], default=(1.0, default))[1]
    pairs = [[seconds_of(each, 1, 0.02) for each in (default, best)] for _ in range(NUM_PAIRS)]
    gains = [_gain(*pair) for pair in pairs]
    return {
        "kernel": problem.kernel,
        "key": KERNELS[problem.kernel].key(problem.shape),
        "default": default,
        "best": best,
        "gain": statistics.median(gains),
        "least_gain": min(gains),
        "us": {name: 1e6 * seconds for name, seconds in pairs[-1][1].items()},
        "num_timed": 1 + len(timed),
        "num_candidates": len(problem.candidates),
    }


def _gain(base: dict[str, float], found: dict[str, float]) -> float:
    ratios = [base[name] / found[name] for name in base]
    return math.exp(statistics.mean(math.log(ratio) for ratio in ratios))


def write_tiles(folder: Path, product: str, swept: Sequence[dict[str, Any]]) -> Path:
    """Write the file of tuned tiles for the GPU model `product`, and return its path."""
    tiles: dict[str, dict[str, Candidate]] = {}
    for figures in swept:
        if figures["best"] != figures["default"] and figures["least_gain"] >= LEAST_GAIN:
            tiles.setdefault(figures["kernel"], {})[figures["key"]] = figures["best"]
    versions = {"penstock": penstock.__version__, "torch": torch.__version__}
    path = folder / file_name(product)
    folder.mkdir(exist_ok=True)
    path.write_text(json.dumps({"product": product, **versions, "tiles": tiles}, indent=1) + "\n")
    return path


def dtype_of(options: Options) -> torch.dtype:
    """Return the dtype to tune for. The interpreter does not compute bfloat16."""
    return torch.bfloat16 if options.device.type == "cuda" else torch.float16


def measure(options: Options, began: float, seconds: float) -> Iterator[dict[str, Any]]:
    """Check and time candidates, and write the file; yield the results so far."""
    ends = began + seconds
    problems = all_problems(options.device, dtype_of(options), options.small)
    swept: dict[str, Any] = {}
    failures: list[str] = []
    figures = {"tuned": swept, "failures": failures}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        lines = check_all(problems, options, folder, began + CHECKED_FRACTION * seconds)
        for number, problem in enumerate(problems):
            passed = [each for each in lines[problem.name] if each["outcome"] == "passed"]
            if not any(each["candidate"] == problem.candidates[0] for each in passed):
                whys = [each["why"] for each in lines[problem.name] if "why" in each]
                failures.append(f"{problem.name}: the default: {(whys or ['no time left'])[0]}")
                continue
            now = time.monotonic()
            until = now + (ends - now) / (len(problems) - number)
            candidates = [each["candidate"] for each in passed]
            with forbid_fallback(options.device):
                swept[problem.name] = sweep(problem, candidates, options.device, until)
            swept[problem.name]["num_passed"] = len(passed)
            product = device_info(torch.empty(0, device=options.device)).product
            write_tiles(folder / FOLDER, product, list(swept.values()))
            yield figures
    yield figures


def main() -> int:
    began = time.monotonic()
    # Without a file of tuned tiles, the launchers' own tiles are the default.
    os.environ.pop(VARIABLE, None)
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--group")
    parser.add_argument("--dtype")
    parser.add_argument("--skipped", type=int, default=0)
    own, others = parser.parse_known_args()
    options = read_options("tuning", others)
    if own.group:
        return child(own.group, options, own.skipped)
    seconds = SECONDS if options.device.type == "cuda" else INTERPRETED_SECONDS
    for figures in measure(options, began, seconds):
        write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
