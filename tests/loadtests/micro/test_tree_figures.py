from pathlib import Path

import pytest

from penstock.loadtests.micro.source_tree import SourceTree
from penstock.loadtests.micro.tree_figures import (
    Amounts,
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
    transfers=4,
    transfer_prompt=256,
    transfers_at_once=2,
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
