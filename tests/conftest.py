"""What holds for every test, and every process that one starts."""

import os
import random

import pytest

from penstock.cluster.processes.descriptors import reserve_descriptors

# Workers and routers serve in the tests' own process too.
reserve_descriptors()

# Small products gain nothing from threads, and threads that wait for each other on a busy machine
# cost tenfold. Set before torch is imported anywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ports that one process of xdist's has seen free are not another's, who would take them first.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    low = 20000 + 4000 * (int(worker.removeprefix("gw")) % 3)
    os.environ["PENSTOCK_FREE_PORTS"] = f"{low}-{low + 4000}"

try:
    from hypothesis import HealthCheck, settings
except ModuleNotFoundError:  # a machine with a GPU may have little: see docs/gpu.md
    pass
else:
    # A busy machine is slow, which is no fault of what is tested.
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
    """Reorder the files, and the tests within each. A file's tests stay together, so that what its
    module-scoped fixtures start is started once."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.location[0], []).append(item)
    order, rng = list(files), random.Random(seed)
    rng.shuffle(order)
    for file in order:
        rng.shuffle(files[file])
    items[:] = [item for file in order for item in files[file]]


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Shuffle, if asked for. With xdist, run all process and cluster tests of a file in one of its
    processes, one after the other."""
    if seed := config.getoption("--shuffle"):
        shuffle(items, seed)
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if any(item.get_closest_marker(name) for name in ("process", "cluster")):
            item.add_marker(pytest.mark.xdist_group(item.location[0]))
