"""Checks and times the collectives of two ranks. Both ranks make the same calls.

Every result is compared with one that is computed from both ranks' inputs. On a GPU, each call is
also captured in a CUDA graph, and the graph is replayed with other inputs.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from penstock.loadtests.gpu.clock import clock_of
from penstock.workers.gpu.cuda_graphs import CudaCaptures
from penstock.workers.parallel.collectives import ProcessGroup

NUM_RANKS = 2
SIZES = (8 << 10, 64 << 10, 1 << 20, 16 << 20)
"""Bytes of a rank's tensor.

Up to 64 KiB, an all-reduce that sums in rank order uses one all-gather.
"""
NUM_CALLS, NUM_ROUNDS = 20, 5  # calls per round, and rounds per measurement, on a GPU

Operation = Callable[[ProcessGroup, Tensor], Tensor]


def _all_to_all(group: ProcessGroup, x: Tensor) -> Tensor:
    even = [len(x) // NUM_RANKS] * NUM_RANKS
    return group.all_to_all(x[:, None], even, even)[:, 0]


OPERATIONS: dict[str, tuple[Operation, Callable[[list[Tensor], int], Tensor]]] = {
    "all-reduce": (
        lambda group, x: group.all_reduce(x),
        lambda tensors, rank: sum((each.double() for each in tensors), torch.zeros(())),
    ),
    "all-gather": (
        lambda group, x: group.all_gather(x),
        lambda tensors, rank: torch.stack(tensors),
    ),
    "broadcast": (
        lambda group, x: group.broadcast(x.clone()),
        lambda tensors, rank: tensors[0],
    ),
    "all-to-all": (
        _all_to_all,
        lambda tensors, rank: torch.cat([each.chunk(NUM_RANKS)[rank] for each in tensors]),
    ),
}
"""For each collective, two functions: one runs it, the other computes a rank's exact result.

The second function gets the inputs of all ranks and the number of the rank.
"""


def inputs_of(rank: int, num_bytes: int, dtype: torch.dtype, number: int) -> Tensor:
    """Return random values for a rank and an input number, the same in every process."""
    generator = torch.Generator().manual_seed(NUM_RANKS * number + rank)
    return torch.randn(num_bytes // dtype.itemsize, generator=generator).to(dtype)


def check_collectives(
    groups: Mapping[str, ProcessGroup], rank: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the figures of every collective and size.

    Args:
        groups: process groups of both ranks; the keys name the order of summation.
    """
    for order, group in groups.items():
        # Only all-reduce adds numbers, so only it depends on the order of summation.
        names = OPERATIONS if group is next(iter(groups.values())) else ("all-reduce",)
        for name in names:
            for num_bytes in SIZES:
                figures = _check(group, name, rank, num_bytes, device, dtype)
                label = f"{name} {order}" if name == "all-reduce" else name
                yield f"{label}, {num_bytes >> 10} KiB", figures


def _check(
    group: ProcessGroup,
    name: str,
    rank: int,
    num_bytes: int,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Any]:
    operation, exact = OPERATIONS[name]
    x = inputs_of(rank, num_bytes, dtype, 0).to(device)

    def error(found: Tensor, number: int) -> float:
        tensors = [inputs_of(each, num_bytes, dtype, number) for each in range(NUM_RANKS)]
        expected = exact(tensors, rank).double()
        return float((found.cpu().double() - expected).norm() / expected.norm())

    errors = [error(operation(group, x), 0)]
    clock = clock_of(device)
    if device.type == "cuda":
        found: list[Tensor] = []

        def calls() -> None:
            found[:] = [operation(group, x) for _ in range(NUM_CALLS)]

        replay = CudaCaptures(device).capture(calls)
        x.copy_(inputs_of(rank, num_bytes, dtype, 1))
        replay()
        errors += [error(found[0], 1), error(found[-1], 1)]
        times = []
        for _ in range(NUM_ROUNDS):
            begin = clock.mark()
            replay()
            times.append(clock.seconds(begin, clock.mark()) / NUM_CALLS)
    else:
        begin = clock.mark()
        operation(group, x)
        times = [clock.seconds(begin, clock.mark())]
    # An all-reduce rounds the sum of two numbers once. The other collectives only copy.
    limit = torch.finfo(dtype).eps / 2 if name == "all-reduce" else 0.0
    return {
        "us": 1e6 * sorted(times)[len(times) // 2],
        "bytes": num_bytes,
        "error": max(errors, key=lambda each: (each != each, each)),
        "passed": all(each <= limit for each in errors),
        "captured": device.type == "cuda",
    }
