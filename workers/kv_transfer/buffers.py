"""Message buffers of KV transfers: preallocated and reused, so that their number is bounded."""

from collections import Counter
from typing import Generic, TypeVar

import torch
from torch import Tensor

from penstock.workers.kv_transfer.protocol.messages import MAX_PEERS

NUM_BUFFERS = 8
"""Buffers per rank and direction."""

BUFFER_BYTES = {"nccl": 32 << 20, "gloo": 8 << 20}
"""Size of a buffer for each backend. A message fits into one buffer, unless one block of one layer
is larger. With gloo, a message stays in the CPU's cache while it is gathered, hashed and sent."""

MAX_PER_PAIR = 2
"""Number of buffers that one rank pair may use at the same time: one is in transit while the other
is copied. The limit keeps buffers free for other pairs if a peer stalls."""

COMMUNICATOR_BYTES = 32 << 20
"""Estimated memory of a rank pair's NCCL communicator on a GPU: `PAIR_CHANNELS` channels of about 7
MiB each, and fixed costs. It has not been measured."""

User = TypeVar("User")


def reserved_bytes() -> int:
    """Return the bytes of GPU memory that KV transfers need, for buffers and communicators."""
    return 2 * NUM_BUFFERS * BUFFER_BYTES["nccl"] + 2 * MAX_PEERS * COMMUNICATOR_BYTES


class BufferRing(Generic[User]):
    """Buffers of one direction of a rank. All methods must be called from one thread.

    On a GPU, the constructor allocates all buffers, because there may be no memory later. On a CPU,
    buffers are allocated when they are first needed.
    """

    def __init__(
        self,
        buffer_bytes: int,
        device: torch.device,
        num_buffers: int = NUM_BUFFERS,
        max_per_user: int = MAX_PER_PAIR,
    ) -> None:
        self.buffer_bytes = buffer_bytes
        self._device = device
        self._num_new = num_buffers  # number of buffers that may still be allocated
        self._max_per_user = max_per_user
        # Most recently used buffer last; it is taken first, because the CPU's cache still has it.
        self._free: list[Tensor] = []
        self._used: Counter[User] = Counter()
        if device.type == "cuda":
            self._free = [self._allocate() for _ in range(num_buffers)]

    def take(self, user: User) -> Tensor | None:
        """Return a free buffer, [buffer_bytes] uint8, or None.

        The result is None if all buffers are in use, or if `user` already has `max_per_user`.
        """
        if self._used[user] >= self._max_per_user or not (self._free or self._num_new):
            return None
        buffer = self._free.pop() if self._free else self._allocate()
        self._used[user] += 1
        return buffer

    def give_back(self, user: User, buffer: Tensor) -> None:
        """Give back a buffer that is no longer in use."""
        self._release(user)
        self._free.append(buffer)

    def discard(self, user: User) -> None:
        """Stop using a buffer to which a failed operation may still write; allow a new buffer."""
        self._release(user)
        self._num_new += 1

    def _release(self, user: User) -> None:
        self._used[user] -= 1
        if not self._used[user]:
            del self._used[user]

    def _allocate(self) -> Tensor:
        buffer = torch.empty(self.buffer_bytes, dtype=torch.uint8, device=self._device)
        self._num_new -= 1  # after the allocation, which may fail and be tried again later
        return buffer
