"""Settings for all tests and the processes that they start."""

import gc
import os
import random

import pytest

from penstock.cluster.processes.descriptors import reserve_descriptors

# Imports and test collection create millions of objects that live until the end of the run. Garbage
# collection over these objects takes a third of the time of test collection; see
# `pytest_collection_finish`.
gc.disable()

# Grow the table of file descriptors, because workers and routers also serve in this process.
reserve_descriptors()

# Small matrix products gain nothing from threads. On a busy machine, threads that wait for each
# other make these products ten times slower. Must be set before torch is imported anywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Each xdist process uses its own range of ports. Otherwise another process could take a port that
# this process has just found free.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    low = 20000 + 4000 * (int(worker.removeprefix("gw")) % 3)
    os.environ["PENSTOCK_FREE_PORTS"] = f"{low}-{low + 4000}"

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # GPU machines may have few packages: see docs/gpu.md
    pass
else:
    # No deadlines: slow tests on a busy machine are not failures.
    settings.register_profile(
        "patient", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle",
        metavar="SEED",
        help="run the files in random order, and the tests of each file (same seed, same order)",
    )


def shuffle(items: list[pytest.Item], seed: str) -> None:
    """Shuffle the files, and the tests within each.

    The tests of a file stay together, so that its module-scoped fixtures start only once.
    """
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.location[0], []).append(item)
    order, rng = list(files), random.Random(seed)
    rng.shuffle(order)
    for file in order:
        rng.shuffle(files[file])
    items[:] = [item for file in order for item in files[file]]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle the tests if `--shuffle` is given."""
    if seed := config.getoption("--shuffle"):
        shuffle(items, seed)


def pytest_collection_finish() -> None:
    """Enable garbage collection, but exclude the objects that exist by now."""
    gc.freeze()
    gc.enable()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Let the garbage collector start in the controller of xdist, which collects no tests."""
    if session.config.getoption("numprocesses", None):
        gc.enable()
