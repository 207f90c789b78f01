"""Collectives of a worker's ranks: all-reduce, all-gather, broadcast, and links between stages.

An all-reduce adds the parts of the ranks in one of two orders:

- In rank order: it gathers the parts and adds them in the order of ranks. For a given number of
  ranks, the results are bitwise identical for any timing and any number of rows.
- In the order of the communicator: NCCL chooses the order, by the number of elements and the links
  between the ranks. This needs fewer launches.

No operation reads sizes or values on the host, so a CUDA graph can capture all of them.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from penstock.workers.parallel.communicator import (
    Communicator,
    backend_for,
    connect,
    first_sentence,
)

SMALL_BYTES = 1 << 16
"""Maximum size for which an all-reduce is one all-gather. A larger all-reduce is an all-to-all and
an all-gather, because these send fewer bytes."""


class RankLost(RuntimeError):
    """Another rank of this worker has exited or does not respond within the timeout."""


class ProcessGroup:
    """A group of a worker's ranks that includes this rank.

    All ranks must make the same calls in the same order. An operation that fails or times out
    raises `RankLost`; then the group cannot be used any more. (With NCCL, calls only enqueue
    operations, and Penstock's watchdogs detect lost ranks.)

    Args:
        size: Number of ranks.
        in_rank_order: Whether all-reduces add in rank order, or in the communicator's order.
    """

    def __init__(self, communicator: Communicator, size: int, in_rank_order: bool = True) -> None:
        self.size = size
        self._communicator = communicator
        self._in_rank_order = in_rank_order

    def all_gather(self, shard: Tensor) -> Tensor:
        """Return the shards of all ranks, in rank order: [size, *shape]. Shapes must be equal."""
        shard = shard.contiguous()
        gathered = shard.new_empty((self.size, *shard.shape))
        if shard.numel():
            self._run(lambda group: group._allgather_base(_bytes(gathered), _bytes(shard)))
        return gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, which have equal shapes; do not change `tensor`."""
        if not self._in_rank_order:
            total = tensor.clone(memory_format=torch.contiguous_format)
            self._run(lambda group: group.allreduce([total]))
            return total
        if tensor.nbytes <= SMALL_BYTES:
            return _sum_in_order(self.all_gather(tensor))
        # Reduce-scatter, then all-gather: each rank sums one slice.
        size = -(-tensor.numel() // self.size)
        padded = tensor.new_zeros(self.size * size)
        padded[: tensor.numel()] = tensor.reshape(-1)
        even = [size] * self.size
        mine = _sum_in_order(self.all_to_all(padded[:, None], even, even).view(self.size, size))
        return self.all_gather(mine).view(-1)[: tensor.numel()].view(tensor.shape)

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows of D features with all ranks: send [sum(sent), D], get [sum(received), D].

        The first `sent[0]` rows go to the group's first rank, and so on. The first `received[0]`
        rows of the result come from the first rank, and so on.
        """
        into = rows.new_empty((sum(received), *rows.shape[1:]))
        out = rows.contiguous()
        self._run(
            lambda group: group.alltoall_base(
                _row_bytes(into), _row_bytes(out), list(received), list(sent)
            )
        )
        return into

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite contiguous `tensor` with the one of the group's first rank; return `tensor`."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._run(lambda group: group.broadcast([tensor], options))
        return tensor

    def _run(self, start: Callable[[Communicator], dist.Work]) -> None:
        _wait(lambda: start(self._communicator))


class StageLinks:
    """Connection to the ranks of the previous and next stage, for hidden states."""

    def __init__(
        self, communicator: Communicator, prev_stage: int | None, next_stage: int | None
    ) -> None:
        self.prev_stage = prev_stage
        self.next_stage = next_stage
        self._communicator = communicator
        self._sending: tuple[dist.Work, Tensor] | None = None

    def receive(self, into: Tensor) -> Tensor:
        """Receive hidden states from the previous stage into `into`; return `into`."""
        before = self.prev_stage
        assert before is not None
        _wait(lambda: self._communicator.recv([into], before, 0))
        return into

    def send(self, hidden: Tensor) -> None:
        """Send `hidden` to the next stage; wait only until the previous send has completed."""
        assert self.next_stage is not None
        if self._sending is not None:
            work = self._sending[0]
            _wait(lambda: work)
        hidden = hidden.contiguous()
        # Keep the tensor until the send has completed, because the next stage may be slower.
        self._sending = self._communicator.send([hidden], self.next_stage, 0), hidden


def make_process_group(
    store: Store,
    ranks: Sequence[int],
    rank: int,
    device: torch.device,
    host: str,
    seconds: float,
    in_rank_order: bool = True,
) -> ProcessGroup:
    """Create the group of `ranks`, which include `rank`; wait for the other ranks.

    Args:
        seconds: Timeout of each operation.
        in_rank_order: See `ProcessGroup`.
    """
    name = "-".join(map(str, ranks))
    communicator = _connect(
        store, f"group {name}", ranks.index(rank), len(ranks), device, host, seconds
    )
    return ProcessGroup(communicator, len(ranks), in_rank_order)


def make_stage_links(
    store: Store,
    num_ranks: int,
    rank: int,
    prev_stage: int | None,
    next_stage: int | None,
    device: torch.device,
    host: str,
    seconds: float,
) -> StageLinks:
    """Create this rank's links to other stages, over a communicator of all ranks."""
    communicator = _connect(store, "stages", rank, num_ranks, device, host, seconds)
    return StageLinks(communicator, prev_stage, next_stage)


def _connect(
    store: Store,
    name: str,
    rank: int,
    num_ranks: int,
    device: torch.device,
    host: str,
    seconds: float,
) -> Communicator:
    prefixed = PrefixStore(name, store)
    try:
        return connect(backend_for(device), prefixed, rank, num_ranks, host, seconds)
    except RuntimeError as error:
        raise RankLost(f"the ranks of {name} could not connect: {first_sentence(error)}") from error


def _wait(start: Callable[[], dist.Work]) -> None:
    try:
        # Pass no timeout, because with NCCL a `wait` with a timeout would block. With gloo, `wait`
        # uses the timeout of the communicator.
        start().wait()
    except RuntimeError as error:
        raise RankLost(first_sentence(error)) from error


def _sum_in_order(tensors: Tensor) -> Tensor:
    """Sum the tensors of `size` ranks, [size, *shape], in rank order; accumulate in float32."""
    total = tensors[0].to(torch.float32, copy=True)
    for tensor in tensors[1:]:
        total += tensor
    return total.to(tensors.dtype)


def _bytes(tensor: Tensor) -> Tensor:
    """View a tensor of any dtype as bytes; communicators do not support all dtypes."""
    return tensor.view(-1).view(torch.uint8)


def _row_bytes(rows: Tensor) -> Tensor:
    """View rows as bytes: [rows, bytes per row] uint8."""
    return rows.view(len(rows), -1).view(torch.uint8) if rows.numel() else (
        rows.new_empty((len(rows), rows[:0].numel()), dtype=torch.uint8)
    )  # fmt: skip
