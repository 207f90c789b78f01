"""Data-parallel training on CPU cores: each process computes the gradients of its own batches.

Each process runs a single thread. The processes synchronize once per step, to sum their gradients.
Several threads in one process would synchronize in every operation. They would lose most of their
time whenever another program uses one of the cores.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn

NUM_PROCESSES = 2
# Timeout of collectives. It is long, because the other process may be paused, or may be evaluating
# a model on a busy machine.
_TIMEOUT = timedelta(hours=3)

Task = Callable[[], None]


def launch(task: Task, size: int) -> None:
    """Run `task` in `size` processes that form one process group."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = (size, Path(folder) / "meet", task)
        spawn(_init_process, args=arguments, nprocs=size)  # type: ignore[no-untyped-call]


def _init_process(rank: int, size: int, init_file: Path, task: Task) -> None:
    torch.set_num_threads(1)
    init_method = f"file://{init_file}"
    distributed.init_process_group("gloo", init_method, _TIMEOUT, rank=rank, world_size=size)
    try:
        task()
    finally:
        distributed.destroy_process_group()


def rank() -> int:
    """Return the rank of this process, or 0 without a process group."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def size() -> int:
    """Return the number of processes in the group, or 1 without a process group."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def all_reduce_(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over all processes."""
    if size() == 1:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    distributed.all_reduce(flat)
    chunks = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, chunk in zip(tensors, chunks, strict=True):
        tensor.copy_(chunk.view_as(tensor))
