"""The measured KV transfer between two processes, with a small cache: all bytes arrive."""

import asyncio
import io
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from penstock.loadtests.micro.source_tree import SourceTree
from penstock.loadtests.micro.transfer import __main__ as transfer
from penstock.loadtests.micro.transfer.__main__ import Amounts, describe, measure_tree
from penstock.loadtests.micro.transfer.adapters import host
from penstock.loadtests.micro.transfer.adapters.host import DestinationProcess, TransferFailed

ROOT = Path(__file__).resolve().parents[4]
SMALL = Amounts(tokens=100, layers=2, heads=2, head_dim=8, block_size=16, rounds=2)
OLDER_COMMIT = "61ff4b3"


@pytest.mark.process
async def test_transfer_and_bare_gloo_move_the_same_bytes_in_turns() -> None:
    figures = await measure_tree(SourceTree(ROOT), SMALL.work)
    assert figures["bytes"] == 7 * 16 * 2 * 2 * 2 * 8 * 4
    for kind in ("transfer", "bare"):
        assert len(figures[kind]["wall"]) == len(figures[kind]["cpu"]) == 2
    assert "bare / transfer" in describe("now", figures)


@pytest.mark.process
def test_changed_byte_fails_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = DestinationProcess.answer

    async def changed(destination: DestinationProcess) -> dict[str, object]:
        found = await answer(destination)
        return {name: "0" if name == "fingerprint" else value for name, value in found.items()}

    monkeypatch.setattr(DestinationProcess, "answer", changed)
    with pytest.raises(TransferFailed, match="fingerprints are not equal"):
        asyncio.run(host.measure(SMALL.work))


def test_fingerprint_depends_on_the_order_and_on_each_byte(tmp_path: Path) -> None:
    side = host.Side(host.SOURCE, SMALL.work, tmp_path)
    prints = [side.fingerprint()]
    side.kv[1, 1, side.blocks[-1], 1, 15, 7] += 1
    prints.append(side.fingerprint())
    side.blocks[[0, 1]] = side.blocks[[1, 0]]
    prints.append(side.fingerprint())
    assert len(set(prints)) == 3


@pytest.fixture
def fingerprints(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fake the runs: each uses the next fingerprint; it takes 2 s with this tree, otherwise 5 s."""
    ahead: list[str] = []

    async def measured(tree: SourceTree, work: host.Work) -> dict[str, Any]:
        seconds = 2.0 if tree.root == ROOT else 5.0
        times = {"wall": [seconds] * work.rounds, "cpu": [seconds - 1] * work.rounds}
        kinds = {"transfer": times, "bare": times}
        return {"bytes": work.num_bytes, "fingerprint": ahead.pop(0), **kinds}

    monkeypatch.setattr(transfer, "measure_tree", measured)
    monkeypatch.setattr(SourceTree, "at", SourceTree)
    return ahead


def test_trees_are_compared_if_they_moved_the_same_bytes(
    fingerprints: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--against", "/older", "--runs", "2"]
    fingerprints += ["a"] * 4
    assert transfer.main(flags) == 0
    assert fingerprints == []
    printed = capsys.readouterr().out
    assert "then / now, time of a transfer: 2.5 (80% of 2: 2.5 to 2.5)" in printed
    assert "then / now, CPU time of a transfer: 4 (80% of 2: 4 to 4)" in printed
    fingerprints += ["a", "a", "a", "b"]
    assert transfer.main(flags) == 1
    assert "different data" in capsys.readouterr().err


@pytest.fixture
def older_tree(tmp_path: Path) -> Path:
    """The modules of an older commit. If the history lacks this commit, the test is skipped."""
    command = ["git", "-C", str(ROOT), "archive", OLDER_COMMIT]
    archived = subprocess.run(
        [*command, "penstock", "workers", "kernels", "protos"], capture_output=True, check=False
    )
    if archived.returncode:
        pytest.skip(f"the history has no commit {OLDER_COMMIT}")
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
        archive.extractall(tmp_path, filter="tar")
    return tmp_path


@pytest.mark.process
def test_adapter_of_the_older_commit_finds_its_classes(older_tree: Path) -> None:
    code = (
        "import runpy, sys; adapter = runpy.run_path(sys.argv[1])['load_adapter']();"
        "print(adapter.__name__, adapter.MESSAGE_BYTES, adapter.Source, adapter.Destination)"
    )
    variables = SourceTree(older_tree).variables
    command = [sys.executable, "-P", "-c", code, host.__file__]
    loaded = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert loaded.stdout.startswith("on_transfer 4194304 "), loaded.stderr
