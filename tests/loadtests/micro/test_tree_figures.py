import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.loadtests.micro import tree_figures
from penstock.loadtests.micro.ab_runner import MeasurementFailed
from penstock.loadtests.micro.server import Running, free_ports
from penstock.loadtests.micro.source_tree import SourceTree
from penstock.loadtests.micro.tree_figures import (
    Amounts,
    assign_prefill_role,
    measure_engine,
    measure_router,
    measure_serving,
)

TREE = SourceTree(Path(__file__).resolve().parents[3])
# The child process uses CPU time for each line that it reads. Its parent process only waits.
CHILD = """
import sys
for line in sys.stdin:
    for i in range(10**6): pass
    print("done", flush=True)
"""
PARENT = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {CHILD!r}])"
FEW = Amounts(
    engine_rounds=1,
    streams=4,
    stream_tokens=40,
    path_rounds=1,
    path_requests=2,
    path_answer=128,
    transfers=16,  # enough prompts, so that the router measures the prefill rate
    transfer_prompt=1024,
    transfers_at_once=4,
)


@pytest.mark.process
async def test_engine_is_measured() -> None:
    figures = await measure_engine(TREE, FEW)
    assert figures.keys() == {"decode", "prefill", "scheduler"}
    assert all(value > 0 for value in figures.values())


@pytest.mark.process
async def test_router_is_measured() -> None:
    figures = await measure_router(TREE, FEW)
    assert figures.keys() == {"router_http", "router_grpc"}


async def test_cpu_time_of_the_routers_helper_processes_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as router:
        assert router.stdin is not None

        @asynccontextmanager
        async def running(*_: object, **__: object) -> AsyncIterator[tuple[int, dict[str, str]]]:
            yield router.pid, {"http": "", "grpc": ""}

        async def load(address: str, streams: int, tokens: int) -> int:
            assert router.stdin is not None
            assert router.stdout is not None
            router.stdin.write(b"work\n")
            router.stdin.flush()
            assert router.stdout.readline() == b"done\n"
            return streams * tokens

        monkeypatch.setattr(SourceTree, "running", running)
        monkeypatch.setattr(tree_figures, "http_load", load)
        monkeypatch.setattr(tree_figures, "grpc_load", load)
        figures = await measure_router(TREE, FEW)
        router.stdin.close()
    # The child uses more than 1 ms for the 160 tokens of each load.
    assert min(figures.values()) > 1e3 / 160


@pytest.mark.cluster
async def test_start_path_and_transfers_are_measured() -> None:
    figures = await measure_serving(TREE, FEW)
    assert figures.keys() == {"start", "path", "transfer"}
    assert figures["start"] > 0
    assert figures["path"] > 0
    assert figures["transfer"] > 0


async def test_unassigned_role_fails_the_measurement() -> None:
    nowhere = f"http://127.0.0.1:{free_ports(1)[0]}"
    server = Running("", "", nowhere, pid=0, ready_seconds=0.0)
    with pytest.raises(MeasurementFailed, match="role was not assigned: cannot reach"):
        await assign_prefill_role(server)
