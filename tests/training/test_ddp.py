"""The processes of a run: alone they sum nothing, together they end with the same sums."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from training import ddp


def write_sum(folder: Path) -> None:
    """One process: adds its rank, and leaves what came out."""
    tensors = [torch.full((2, 2), 1.0 + ddp.rank()), torch.tensor([10.0])]
    ddp.all_reduce_(tensors)
    torch.save(tensors, folder / f"{ddp.rank()}.pt")


def test_a_process_alone_keeps_its_tensors(tmp_path: Path) -> None:
    write_sum(tmp_path)
    assert (ddp.rank(), ddp.size()) == (0, 1)
    assert torch.load(tmp_path / "0.pt")[1].tolist() == [10.0]


@pytest.mark.process
def test_two_processes_end_with_the_same_sums(tmp_path: Path) -> None:
    ddp.launch(partial(write_sum, tmp_path), 2)
    for rank in (0, 1):
        matrix, scalar = torch.load(tmp_path / f"{rank}.pt")
        assert matrix.tolist() == [[3.0, 3.0], [3.0, 3.0]]
        assert scalar.tolist() == [20.0]
