from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from penstock.router.config import RouterConfig
from tests.support.callback_times import CallbackTimes
from tests.support.served_router import Served, model_folder, serving
from tests.support.stub_worker import StubWorker

MAX_CALLBACK_SECONDS = 0.05
"""CPU time that one callback of a router's event loop may take."""


@pytest.fixture(autouse=True)
def callback_times() -> Iterator[CallbackTimes]:
    """Fail the test if a callback of the router held the event loop for too long."""
    times = CallbackTimes(MAX_CALLBACK_SECONDS)
    with times.measuring():
        yield times
    assert times.slow == [], f"callbacks above {MAX_CALLBACK_SECONDS * 1000:.0f} ms of CPU time"


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def config(folder: Path) -> RouterConfig:
    return RouterConfig(folder, "stub")


@pytest_asyncio.fixture
async def served(config: RouterConfig) -> AsyncIterator[Served]:
    """A router and one mixed worker."""
    async with serving(config, StubWorker()) as served:
        yield served


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def shared_served(config: RouterConfig) -> AsyncIterator[Served]:
    """A router and one mixed worker; all tests of a module share both and their event loop."""
    async with serving(config, StubWorker()) as served:
        yield served
