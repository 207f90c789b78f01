"""Prints the engine and scheduler ratios of a source tree as one line of JSON.

`python -P engine_probe.py MODULE ROUNDS THREADS` runs this file as a script. PYTHONPATH contains
the source tree, which may be of another commit than this file. MODULE is the name of the tree's
regression check.
"""

import importlib
import json
import sys


def main(module: str, rounds: str, threads: str) -> None:
    """Run the check's `measure` with `rounds` rounds, without measuring `penstock serve`.

    The number of rounds is a module constant, whose name differs between commits.
    """
    check = importlib.import_module(module)
    constants = [name for name in ("_ROUNDS", "_TURNS") if hasattr(check, name)]
    assert constants, (
        f"{module} has none of the constants for the number of rounds: _ROUNDS, _TURNS"
    )
    for name in constants:
        setattr(check, name, int(rounds))
    check._path = lambda threads: []  # type: ignore[attr-defined]
    print(json.dumps(check.measure(int(threads))))


if __name__ == "__main__":
    main(*sys.argv[1:])
