"""Verification of KV transfer messages: each is followed by a trailer with its checksum."""

import torch

from penstock.kernels.kv_cache.checksum import checksum
from penstock.workers.kv_transfer.transport import PairBroken


def make_trailer(epoch: int, index: int, data: torch.Tensor) -> torch.Tensor:
    """Return the trailer of message `index` of a transfer: [3] int64 of epoch, index, checksum."""
    value = checksum(data)
    signed = value - (1 << 64) if value >> 63 else value
    return torch.tensor([epoch, index, signed], device=data.device)


def verify(trailer: torch.Tensor, epoch: int, index: int, data: torch.Tensor) -> str:
    """Compare received bytes with their trailer; return the problem, or "" if they agree.

    Raises:
        PairBroken: the trailer belongs to another message, so the two ranks are out of step.
    """
    expected = make_trailer(epoch, index, data)
    if not torch.equal(trailer[:2], expected[:2]):
        raise PairBroken(
            f"a message came out of order: expected message {index} of transfer {epoch}"
        )
    return "" if torch.equal(trailer, expected) else f"checksum mismatch in message {index}"
