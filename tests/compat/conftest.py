from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from penstock.router.config import RouterConfig
from tests.support.openai_client import connect
from tests.support.served_router import Served, model_folder, serving
from tests.support.stub_worker import StubWorker


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_folder(tmp_path_factory.mktemp("compat"))


@pytest.fixture(scope="session")
def config(folder: Path) -> RouterConfig:
    return RouterConfig(folder, "stub")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def module_served(config: RouterConfig) -> AsyncIterator[Served]:
    """A router and one mixed worker; all tests of a module share both and their event loop."""
    async with serving(config, StubWorker()) as served:
        yield served


@pytest.fixture
def served(module_served: Served) -> Served:
    """Return the module's router, whose worker has recorded no submissions."""
    module_served.worker.submits.clear()
    return module_served


@pytest_asyncio.fixture(loop_scope="module")
async def client(served: Served) -> AsyncIterator[Any]:
    async with connect(served) as client:
        yield client
