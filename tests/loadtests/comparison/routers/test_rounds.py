"""Rounds of the router comparison with real processes: Penstock's router and a byte forwarder."""

import sys
from pathlib import Path

import psutil
import pytest

from penstock.loadtests.comparison.engines import HERE
from penstock.loadtests.comparison.environments import cache_folder, is_installed, python_of
from penstock.loadtests.comparison.routers import process
from penstock.loadtests.comparison.routers.client import read_streams
from penstock.loadtests.comparison.routers.figures import DIRECT
from penstock.loadtests.comparison.routers.process import peer_router, process_tree
from penstock.loadtests.comparison.routers.rounds import Rounds, Work
from penstock.loadtests.comparison.routers.routers import PEERS, Router
from penstock.loadtests.comparison.routers.stubs import stub
from penstock.loadtests.micro.ab_runner import MeasurementFailed
from tests.support.serving import is_alive

pytestmark = [pytest.mark.process, pytest.mark.slow]

FORWARDER = """
import asyncio, sys

host, port, stub_host, stub_port = sys.argv[1:]

async def copy(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
    writer.close()

async def serve(reader, writer):
    other, to_other = await asyncio.open_connection(stub_host, stub_port)
    await asyncio.gather(copy(reader, to_other), copy(other, writer), return_exceptions=True)

async def main():
    server = await asyncio.start_server(serve, host, port)
    await server.serve_forever()

asyncio.run(main())
"""
ADAPTER = """
import contextlib, sys
from host import running

@contextlib.contextmanager
def router(options):
    if options.get("broken"):
        raise RuntimeError("no such setting")
    addresses = [*options["address"].split(":"), *options["stub"].split(":")]
    with running([sys.executable, FILE, *addresses], f"http://{options['address']}/health"):
        yield {"version": "1"}
"""
FAKE = Router("fake", "Forwarder", HERE, "on_fake")
WORK = Work(streams=4, output_len=40, step_ms=2.0, probes=2, idle_seconds=0.2, saturate=False)


@pytest.fixture
def _fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "forwarder.py"
    file.write_text(FORWARDER)
    (tmp_path / "host.py").write_text((process._ADAPTERS / "host.py").read_text())
    (tmp_path / "on_fake.py").write_text(ADAPTER.replace("FILE", repr(str(file))))
    monkeypatch.setattr(process, "_ADAPTERS", tmp_path)


@pytest.mark.usefixtures("_fake")
async def test_rounds_measure_all_targets_and_leave_no_process() -> None:
    lines: list[str] = []
    async with Rounds([(FAKE, Path(sys.executable))], WORK) as rounds:
        assert [target.name for target in rounds.targets] == [DIRECT, "penstock", "fake"]
        assert rounds.targets[2].about == {"version": "1"}
        trees = [each for target in rounds.targets for each in process_tree(target.pid)]
        assert len(trees) >= 4  # the forwarder is a child of its adapter
        samples = [await rounds.run(number, lines.append) for number in range(2)]
    assert not [each for each in trees if is_alive(each)]
    for round_ in samples:
        assert list(round_) == [DIRECT, "penstock", "fake"]
        assert all(sample.writes_per_token > 0 for sample in round_.values())
    assert lines == [
        *("first tokens", "the stub alone", "Penstock", "Forwarder"),
        *("first tokens", "Penstock", "Forwarder", "the stub alone"),
    ]


@pytest.mark.usefixtures("_fake")
async def test_router_that_does_not_start_reports_the_end_of_its_log() -> None:
    broken = Router("fake", "Forwarder", HERE, "on_fake", {"broken": True})
    with pytest.raises(MeasurementFailed, match=r"Forwarder did not start[\s\S]*no such setting"):
        async with peer_router(broken, Path(sys.executable), "127.0.0.1:1"):
            pass


@pytest.mark.parametrize("router", PEERS, ids=lambda router: router.name)
async def test_installed_router_forwards_every_token(router: Router) -> None:
    cache = cache_folder()
    if not is_installed(router.environment, cache):
        pytest.skip(f"{router.name} is not installed")
    async with stub("openai", 5.0) as server:
        python = python_of(router.environment, cache)
        async with peer_router(router, python, server.address) as target:
            (await read_streams(target.address, 4, 20)).check(20)
            tree = process_tree(target.pid)
    psutil.wait_procs(tree, timeout=10.0)
    assert not [each for each in tree if is_alive(each)]
