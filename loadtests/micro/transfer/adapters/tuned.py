"""Runs `host` in a process that is tuned like a worker's: `python -P tuned.py WORK [FOLDER]`.

Workers set options of malloc and OpenMP before they import torch. These options affect the transfer
times of older commits, which allocate memory for each message.
"""

import importlib
import importlib.util
import runpy
from pathlib import Path

TUNING = (
    ("penstock.workers.rank.process_tuning", "tune_process"),
    ("penstock.workers.process", "settle"),
)
"""Module and function that tune a worker's process: the current names, then those of 61ff4b3."""


def tune() -> None:
    """Call the tuning function of the tree from which this process imports Penstock."""
    for module, function in TUNING:
        folder, _, _ = module.rpartition(".")
        if importlib.util.find_spec(folder) and importlib.util.find_spec(module):
            getattr(importlib.import_module(module), function)()
            return
    raise ImportError("this source tree has no function that tunes a worker's process")


if __name__ == "__main__":
    tune()
    runpy.run_path(str(Path(__file__).with_name("host.py")), run_name="__main__")
