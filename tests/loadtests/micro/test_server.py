import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.loadtests.micro import overhead, throughput
from penstock.loadtests.micro.ab_runner import SHIPPED_MODEL
from penstock.loadtests.micro.server import ServerFailed, free_ports, serving

SMALL = ["--model", str(SHIPPED_MODEL.parent / "demo-small")]


def test_free_ports_can_be_listened_on() -> None:
    ports = free_ports(3)
    assert len(set(ports)) == 3
    for port in ports:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", port))


@pytest.mark.process
async def test_failed_start_of_a_server_reports_the_reason() -> None:
    with pytest.raises(ServerFailed, match=r"(?s)penstock serve exited.*no-such-flag"):
        async with serving(["--no-such-flag"]):
            pytest.fail("the server must not become ready")


@pytest.mark.process
def test_the_bench_needs_neither_torch_nor_ray() -> None:
    code = (
        "import sys, penstock.loadtests.bench.command; print({'torch', 'ray'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


@pytest.mark.cluster
def test_throughput_is_measured(tmp_path: Path) -> None:
    saved = tmp_path / "o.json"
    # Send one request at a time, because two requests might never decode at the same time.
    flags = ["--concurrency", "1", "--rounds", "1", "--output-len", "128", "--input-len", "20"]
    assert throughput.main([*SMALL, *flags, "--save-json", str(saved)]) == 0
    result = json.loads(saved.read_text())
    for phase in ("decode", "with_prefill"):
        for name in ("ratio", "through_path", "engine_alone"):
            assert result[f"{phase}_{name}"]["median"] > 0
            assert result[f"{phase}_{name}"]["count"] == 1


@pytest.mark.cluster
def test_overhead_is_measured(tmp_path: Path) -> None:
    saved = tmp_path / "o.json"
    assert overhead.main([*SMALL, "--num-requests", "2", "--save-json", str(saved)]) == 0
    for figures in json.loads(saved.read_text())["added"].values():
        assert figures["ttft_ms"]["count"] == 2
        assert figures["prefill_ms"]["median"] > 0


def test_free_ports_are_in_the_configured_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_FREE_PORTS", "21000-23000")
    assert all(21000 <= port < 23000 for port in free_ports(20))
