"""Data-parallel training processes: `all_reduce_` in one process and in two."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from training import ddp


def write_sum(folder: Path) -> None:
    """Reduce tensors that depend on the rank; save the result as `{rank}.pt`."""
    tensors = [torch.full((2, 2), 1.0 + ddp.rank()), torch.tensor([10.0])]
    ddp.all_reduce_(tensors)
    torch.save(tensors, folder / f"{ddp.rank()}.pt")


def test_all_reduce_in_a_single_process_changes_nothing(tmp_path: Path) -> None:
    write_sum(tmp_path)
    assert (ddp.rank(), ddp.size()) == (0, 1)
    assert torch.load(tmp_path / "0.pt")[1].tolist() == [10.0]


@pytest.mark.process
def test_all_reduce_gives_two_processes_the_same_sums(tmp_path: Path) -> None:
    ddp.launch(partial(write_sum, tmp_path), 2)
    for rank in (0, 1):
        matrix, scalar = torch.load(tmp_path / f"{rank}.pt")
        assert matrix.tolist() == [[3.0, 3.0], [3.0, 3.0]]
        assert scalar.tolist() == [20.0]
