"""Communicators of torch, made outside of its global state: gloo on CPUs, NCCL on GPUs."""

import re
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store


class Communicator(Protocol):
    """What is used of a process group."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work: ...
    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> dist.Work: ...
    def abort(self) -> None: ...
    def _allgather_base(self, into: torch.Tensor, shard: torch.Tensor) -> dist.Work: ...
    def alltoall_base(
        self, into: torch.Tensor, out: torch.Tensor, received: list[int], sent: list[int]
    ) -> dist.Work: ...


def backend_for(device: torch.device) -> str:
    """The communicator that moves tensors of that device."""
    return "nccl" if device.type == "cuda" else "gloo"


def connect(
    backend: str, store: Store, rank: int, num_ranks: int, host: str, seconds: float
) -> Communicator:
    """The communicator of those who meet in `store`; waits for the others.

    `host` is the address that gloo listens on; an operation that takes longer than `seconds` fails.
    """
    if backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timedelta(seconds=seconds)
        return cast(Communicator, dist.ProcessGroupNCCL(store, rank, num_ranks, nccl))
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._timeout = timedelta(seconds=seconds)
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return cast(Communicator, dist.ProcessGroupGloo(store, rank, num_ranks, gloo))


def first_sentence(error: Exception) -> str:
    """The first sentence of torch's message, without its place in the source."""
    return re.sub(r"^\[[^]]*\] ", "", str(error)).splitlines()[0].split(". ")[0]
