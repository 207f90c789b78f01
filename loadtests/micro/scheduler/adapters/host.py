"""Host process of one scheduler: reads cells from stdin, writes results to stdout (JSON lines).

Runs as `python host.py SIDE` under that side's own interpreter, and therefore imports only the
standard library. A side is a module in this folder with

    start() -> (Adapter, about)

`Adapter(cell)` is a new scheduler for a cell (a dictionary of `cells.Cell`), with

    submit(prompts: list[list[int]], output_len: int) -> int     nanoseconds of thread CPU time
    step() -> tuple[int, int, int]                nanoseconds, tokens computed, sequences left
    preempted: int                                preemptions since the start

The times are those of the scheduler itself. They exclude the creation of its inputs and of the
sampled tokens.
"""

import gc
import importlib
import json
import os
import random
import sys
from typing import Any

VOCAB = 32_000
DRAWN = 7  # token id of every sampled token


def drive(side: Any, cell: dict[str, Any]) -> dict[str, Any]:
    """Bring a new scheduler into the initial state that `cell` describes, and measure its steps."""
    draw = random.Random(0)
    prefix = draw.choices(range(VOCAB), k=cell["shared"])

    def prompts(lengths: list[int]) -> list[list[int]]:
        return [prefix + draw.choices(range(VOCAB), k=n - len(prefix)) for n in lengths]

    if prefix:
        run_out(side, [prefix])
    if cell["running"]:
        lengths = [cell["running_len"] + i % 16 for i in range(cell["running"])]
        side.submit(prompts(lengths), cell["output_len"])
        while side.step()[1] != cell["running"]:
            pass
    arriving = [cell["arriving_len"]] * cell["arriving"]
    if cell["first_len"]:
        arriving[0] = cell["first_len"]
    made = prompts(arriving)
    before = side.preempted
    gc.collect()
    gc.freeze()
    submitting = side.submit(made, cell["arriving_output_len"]) if made else 0
    steps, tokens = measured(side, cell["num_steps"])
    gc.unfreeze()
    return {
        "submit_ns": submitting,
        "step_ns": steps,
        "tokens": tokens,
        "preempted": side.preempted - before,
    }


def measured(side: Any, num_steps: int) -> tuple[list[int], int]:
    """Run and measure steps. Return the nanoseconds of each step and the number of computed tokens.

    If `num_steps` is 0, steps are run until no sequences are left.
    """
    steps: list[int] = []
    tokens, left = 0, 1
    while len(steps) < num_steps or (not num_steps and left):
        spent, computed, left = side.step()
        steps.append(spent)
        tokens += computed
    return steps, tokens


def run_out(side: Any, prompts: list[list[int]]) -> None:
    """Run the prompts to completion, with one answer token each."""
    side.submit(prompts, 1)
    while side.step()[2]:
        pass


def main() -> int:
    """Serve requests until stdin is closed."""
    # The engine's own output goes to stderr, so that the real stdout has only replies.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    side, about = importlib.import_module(sys.argv[1]).start()
    reply({"about": about})
    for line in sys.stdin:
        cell = json.loads(line)
        reply(drive(side(cell), cell))
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # exits without waiting for threads that engines leave running
