"""Data parallelism: each process computes a share of every batch on one core.

Every process has one thread, and gradients are summed once per step. Threads that synchronize in
every operation would lose most of their time as soon as another program uses a core.
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
# Timeout of a collective: the other process may be evaluating on a busy machine, or be paused.
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
    """Return the rank of this process; 0 if there is only one."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def size() -> int:
    """Return the number of processes."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def all_reduce_(tensors: Sequence[Tensor]) -> None:
    """Replace each tensor by its sum over the processes."""
    if size() == 1:
        return
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    distributed.all_reduce(flat)
    chunks = torch.split(flat, [tensor.numel() for tensor in tensors])
    for tensor, chunk in zip(tensors, chunks, strict=True):
        tensor.copy_(chunk.view_as(tensor))
