"""Fuzz a router with stub workers: `python -m tests.fuzz [--inputs N] [--seed N]`.

The inputs are requests with any values in any field of the HTTP and gRPC APIs, malformed messages
and malformed HTTP. The same seed gives the same inputs. The command fails if an input causes an
internal error, a traceback or a warning in the log, a long callback, a request that stays open, or
a change in another stream; it then prints the command that sends this input again.
"""

import argparse
import json
import subprocess
import sys
from collections import Counter

from tests.fuzz.inputs import from_text, to_text
from tests.fuzz.run import Result, replay, run
from tests.fuzz.strategies import BODIES, METHODS, SERVICES

NEEDED = 5000
"""A run of at least this many inputs fails if a route or method has answered none successfully."""


def main() -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=20_000, help="number of inputs")
    parser.add_argument("--seed", type=int, default=0, help="the same seed draws the same inputs")
    parser.add_argument("--processes", type=int, default=2, help="each sends a part of the inputs")
    parser.add_argument("--replay", metavar="INPUT", help="send one input, as printed by a failure")
    options = parser.parse_args()
    if options.replay:
        return _replay(options.replay)
    if options.processes > 1:
        return _run_processes(options.inputs, options.seed, options.processes)
    result = run(
        options.inputs, options.seed, lambda line: print(line, file=sys.stderr, flush=True)
    )
    return _report(result)


def _replay(text: str) -> int:
    given = from_text(text)
    print(given)
    problem = replay(given)
    print(problem or "no problem")
    return 1 if problem else 0


def _run_processes(num_inputs: int, seed: int, count: int) -> int:
    share = -(-num_inputs // count)
    command = [sys.executable, "-m", "tests.fuzz", "--processes", "1", "--inputs", str(share)]
    children = [
        subprocess.Popen([*command, "--seed", str(count * seed + index)]) for index in range(count)
    ]
    return max(child.wait() for child in children)


def unreached(reached: Counter[str]) -> list[str]:
    """Return the routes and methods that answered no input successfully."""
    # Paths with the id of a stored response are left out, because no input contains such an id.
    wanted = [f"POST {path} 200" for path in BODIES if "{id}" not in path]
    wanted += [
        f"{name} OK" for name, each in METHODS.items() if each.containing_service is SERVICES[0]
    ]
    return [name for name in wanted if not reached[name]]


def _report(result: Result) -> int:
    figures = {
        "inputs": result.num_inputs,
        "seconds": round(result.seconds),
        "longest_callback_ms": round(1000 * result.longest_callback),
        "memory_growth_mib": result.growth >> 20,
        "reached": dict(sorted(result.reached.items())),
    }
    print(json.dumps(figures), flush=True)
    missing = unreached(result.reached) if result.num_inputs >= NEEDED else []
    if missing:
        print(f"no input was answered well by: {', '.join(missing)}")
    if result.problem:
        print(f"problem: {result.problem}")
    if result.failing is not None:
        print(f"input: {result.failing}")
        print(f"replay: python -m tests.fuzz --replay {to_text(result.failing)}")
    return 1 if missing or result.problem else 0


if __name__ == "__main__":
    sys.exit(main())
