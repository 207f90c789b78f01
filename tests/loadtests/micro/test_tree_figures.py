from pathlib import Path

import pytest

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
