"""Runs one engine and answers for it: JSON lines in on stdin, JSON lines out on stdout.

`python host.py ADAPTER OPTIONS`, under the engine's own interpreter; standard library only. An
adapter is a module beside this one with

    engine(options): a context manager that gives (generate, about)
    generate(prompts: list[list[int]], output_len: int) -> list[list[int]]

where `generate` answers all prompts at once, greedily, with `output_len` tokens each whatever they
are, and nothing is kept between calls that would make a later one cheaper. `about` is what a reader
of the figures must know: versions, number formats. The time taken is that of `generate`.
"""

import ctypes
import importlib
import json
import os
import signal
import sys
import time
from typing import Any

_PR_SET_PDEATHSIG = 1


def main() -> int:
    adapter, options = sys.argv[1], json.loads(sys.argv[2])
    if options["paused"] and sys.platform == "linux":
        # Asleep it would not see that nobody is left to wake it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # Engines print what they like; only answers go to the real stdout.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    with importlib.import_module(adapter).engine(options) as (generate, about):
        reply({"about": about})
        for line in sys.stdin:
            request = json.loads(line)
            began = time.perf_counter()
            tokens = generate(request["prompts"], request["output_len"])
            reply({"seconds": time.perf_counter() - began, "tokens": tokens})
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # engines leave threads behind, and some crash while they are taken down
