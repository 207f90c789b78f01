"""Settings for all tests and the processes that they start."""

import functools
import gc
import os
import random
import ssl
from typing import Any

import pytest

from penstock.cluster.processes.descriptors import reserve_descriptors

# Imports and the collection of tests create millions of objects that live until the end.
# Garbage collection over these objects would take a third of the time of test collection.
# `pytest_collection_finish` enables garbage collection again.
gc.disable()

# Grow the table of file descriptors, because workers and routers also serve in this process.
reserve_descriptors()

# Threads do not speed up small matrix products, and slow them down tenfold on a busy machine.
# This variable must be set before torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Each new HTTP client makes an SSL context with all CA certificates (50 ms of CPU time). No test
# uses TLS, so all clients share one context.
tls: Any = ssl
tls.create_default_context = functools.cache(ssl.create_default_context)

# Each xdist process takes free ports from its own range, so that two never take the same port.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    low = 20000 + 4000 * (int(worker.removeprefix("gw")) % 3)
    os.environ["PENSTOCK_FREE_PORTS"] = f"{low}-{low + 4000}"

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # a GPU machine may lack hypothesis (docs/gpu.md)
    pass
else:
    # No deadlines: on a busy machine, a slow test is not a failure.
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
    """Enable garbage collection in the controller of xdist, which gathers no tests itself."""
    if session.config.getoption("numprocesses", None):
        gc.enable()
