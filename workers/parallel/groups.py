"""Ranks that compute together: sums in the order of ranks, gathering, exchange, handing on.

A sum is made where its parts have met, one after the other: which bits it has depends on the
number of ranks and on nothing else, neither on time nor on how many rows there are.
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
"""Sums up to here take one round, in which everybody gets all parts; others two, of less each."""


class RankLost(RuntimeError):
    """Another rank of this worker is gone, or silent for too long."""


class ProcessGroup:
    """Some ranks of a worker, this one among them. All make the same calls in the same order.

    An operation that fails or takes too long raises `RankLost`; the group is of no use then. (By
    NCCL operations only begin here; it is its own watchdog that ends what takes too long.)
    """

    def __init__(self, communicator: Communicator, size: int) -> None:
        self.size = size
        self._communicator = communicator

    def all_gather(self, shard: Tensor) -> Tensor:
        """Everybody's parts, which are of one shape: [size, *shape], in the order of ranks."""
        shard = shard.contiguous()
        gathered = shard.new_empty((self.size, *shard.shape))
        if shard.numel():
            self._run(lambda group: group._allgather_base(_bytes(gathered), _bytes(shard)))
        return gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """What all parts, which are of one shape, make together; nobody's part is changed."""
        if tensor.nbytes <= SMALL_BYTES:
            return _sum_in_order(self.all_gather(tensor))
        # Each rank adds up one slice of it, and tells the others.
        size = -(-tensor.numel() // self.size)
        padded = tensor.new_zeros(self.size * size)
        padded[: tensor.numel()] = tensor.reshape(-1)
        even = [size] * self.size
        mine = _sum_in_order(self.all_to_all(padded[:, None], even, even).view(self.size, size))
        return self.all_gather(mine).view(-1)[: tensor.numel()].view(tensor.shape)

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows to everybody and from everybody: [sum(sent), D] to [sum(received), D].

        The first `sent[0]` rows go to the first rank, and so on; likewise what comes back.
        """
        into = rows.new_empty((sum(received), *rows.shape[1:]))
        out = rows.contiguous()
        self._run(
            lambda group: group.alltoall_base(
                _row_bytes(into), _row_bytes(out), list(received), list(sent)
            )
        )
        return into

    def _run(self, start: Callable[[Communicator], dist.Work]) -> None:
        _wait(lambda: start(self._communicator))


class StageLinks:
    """To the ranks of other stages that hidden states come from and go to."""

    def __init__(
        self, communicator: Communicator, prev_stage: int | None, next_stage: int | None
    ) -> None:
        self.prev_stage = prev_stage
        self.next_stage = next_stage
        self._communicator = communicator
        self._sending: tuple[dist.Work, Tensor] | None = None

    def receive(self, into: Tensor) -> Tensor:
        """Fills it with what the stage before sent, and returns it."""
        before = self.prev_stage
        assert before is not None
        _wait(lambda: self._communicator.recv([into], before, 0))
        return into

    def send(self, hidden: Tensor) -> None:
        """To the next stage; returns when what was sent before this has gone."""
        assert self.next_stage is not None
        if self._sending is not None:
            work = self._sending[0]
            _wait(lambda: work)
        hidden = hidden.contiguous()
        # Kept until it has gone; the next stage may be a step behind.
        self._sending = self._communicator.send([hidden], self.next_stage, 0), hidden


def make_process_group(
    store: Store, ranks: Sequence[int], rank: int, device: torch.device, host: str, seconds: float
) -> ProcessGroup:
    """The group of `ranks`, of which `rank` is one; waits for the others in `store`."""
    name = "-".join(map(str, ranks))
    communicator = _connect(
        store, f"group {name}", ranks.index(rank), len(ranks), device, host, seconds
    )
    return ProcessGroup(communicator, len(ranks))


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
    """This rank's links between stages, out of a communicator of all ranks."""
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
        raise RankLost(f"the ranks of {name} did not meet: {first_sentence(error)}") from error


def _wait(start: Callable[[], dist.Work]) -> None:
    try:
        start().wait()  # as long as the communicator was told; with a bound NCCL would block here
    except RuntimeError as error:
        raise RankLost(first_sentence(error)) from error


def _sum_in_order(tensors: Tensor) -> Tensor:
    """[size, *shape] to [*shape], in order; narrow numbers are added up in float32."""
    total = tensors[0].to(torch.float32, copy=True)
    for tensor in tensors[1:]:
        total += tensor
    return total.to(tensors.dtype)


def _bytes(tensor: Tensor) -> Tensor:
    """Any dtype as bytes: not every communicator knows each."""
    return tensor.view(-1).view(torch.uint8)


def _row_bytes(rows: Tensor) -> Tensor:
    """The same, row by row: [rows, bytes of a row]."""
    return rows.view(len(rows), -1).view(torch.uint8) if rows.numel() else (
        rows.new_empty((len(rows), rows[:0].numel()), dtype=torch.uint8)
    )  # fmt: skip
