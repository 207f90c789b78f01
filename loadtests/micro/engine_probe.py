"""Prints the engine and scheduler ratios of the source tree on PYTHONPATH, as one line of JSON.

`python -P engine_probe.py MODULE ROUNDS THREADS` runs as a script, because MODULE may belong to
another commit. MODULE is that commit's regression check.
"""

import importlib
import json
import sys


def main(module: str, rounds: str, threads: str) -> None:
    """Run `measure` of the check with `rounds` rounds, without the path through `penstock serve`.

    The number of rounds is a constant of the check, and its name differs between commits.
    """
    check = importlib.import_module(module)
    constants = [name for name in ("_ROUNDS", "_TURNS") if hasattr(check, name)]
    assert constants, f"{module} has no number of rounds"
    for name in constants:
        setattr(check, name, int(rounds))
    check._path = lambda threads: []  # type: ignore[attr-defined]
    print(json.dumps(check.measure(int(threads))))


if __name__ == "__main__":
    main(*sys.argv[1:])
