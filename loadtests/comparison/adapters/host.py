"""Host process of one engine: reads requests from stdin, writes replies to stdout (JSON lines).

Runs as `python host.py ADAPTER OPTIONS` under the engine's own interpreter, and therefore imports
only the standard library. An adapter is a module in this folder with

    engine(options): a context manager that yields (generate, about)
    generate(prompts: list[list[int]], output_len: int) -> list[list[int]]

`generate` decodes all prompts in one batch, greedily, to exactly `output_len` tokens each. It must
not cache anything that makes a later call cheaper. `about` describes the engine for the report:
versions and number formats. The reported seconds are the duration of `generate`.
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
    """Serve requests until stdin is closed."""
    adapter, options = sys.argv[1], json.loads(sys.argv[2])
    if options["paused"] and sys.platform == "linux":
        # A stopped process cannot react to the death of its parent, so the kernel must kill it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # The engine's own output goes to stderr, so that the real stdout has only replies.
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
    os._exit(code)  # the normal shutdown of the interpreter crashes or hangs with some engines
