"""Creates torch communicators without torch's global state: gloo on CPUs, NCCL on GPUs."""

import re
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store


class Communicator(Protocol):
    """Interface of torch's process groups, reduced to the methods that Penstock calls."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work: ...
    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work: ...
    def abort(self) -> None: ...
    def allreduce(self, tensors: list[torch.Tensor]) -> dist.Work: ...
    def broadcast(
        self, tensors: list[torch.Tensor], options: dist.BroadcastOptions
    ) -> dist.Work: ...
    def _allgather_base(self, into: torch.Tensor, shard: torch.Tensor) -> dist.Work: ...
    def alltoall_base(
        self, into: torch.Tensor, out: torch.Tensor, received: list[int], sent: list[int]
    ) -> dist.Work: ...


def backend_for(device: torch.device) -> str:
    """Return the backend for tensors of `device`: "nccl" or "gloo"."""
    return "nccl" if device.type == "cuda" else "gloo"


PAIR_CHANNELS = 4
"""Maximum number of NCCL channels of a rank pair. Each channel has buffers on the GPU."""


def connect(
    backend: str,
    store: Store,
    rank: int,
    num_ranks: int,
    host: str,
    seconds: float,
    few_channels: bool = False,
) -> Communicator:
    """Create a communicator of the `num_ranks` ranks that share `store`; wait for all of them.

    Args:
        host: Address that gloo listens on.
        seconds: Timeout of each operation.
        few_channels: Use at most `PAIR_CHANNELS` channels with NCCL, to save memory.
    """
    if backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timedelta(seconds=seconds)
        if few_channels:
            nccl.config.max_ctas = PAIR_CHANNELS
        return cast(Communicator, dist.ProcessGroupNCCL(store, rank, num_ranks, nccl))
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timedelta(seconds=seconds)
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return cast(Communicator, dist.ProcessGroupGloo(store, rank, num_ranks, gloo))


def first_sentence(error: Exception) -> str:
    """Return the first sentence of torch's error message, without the source location."""
    return re.sub(r"^\[[^]]*\] ", "", str(error)).splitlines()[0].split(". ")[0]
