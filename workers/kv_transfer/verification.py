"""Verification of KV transfer messages by a trailer, which contains a checksum.

A message consists of data, padding to a multiple of 8 bytes, and the trailer: three int64, which
are the transfer's epoch, the index of the message and the checksum of the data. No function here
waits for the device.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.kv_cache.checksum import checksum_on_device
from penstock.workers.gpu.pinned import put
from penstock.workers.kv_transfer.buffers import BUFFER_BYTES
from penstock.workers.kv_transfer.transport import PairBroken

TRAILER_BYTES = 3 * 8


def max_data_bytes(backend: str) -> int:
    """Return the maximum size of a message's data, in bytes.

    Only a message of a single block of one layer may be larger. A buffer also has room for the
    padding and the trailer.
    """
    return BUFFER_BYTES[backend] - 2 * TRAILER_BYTES


def message_bytes(num_bytes: int) -> int:
    """Return the size of a message with `num_bytes` bytes of data."""
    return -(-num_bytes // 8) * 8 + TRAILER_BYTES


def seal(message: Tensor, num_bytes: int, epoch: int, index: int) -> None:
    """Write the trailer of message `index` of a transfer to the end of the message.

    Args:
        message: [message_bytes(num_bytes)] uint8, with the data in front.
    """
    trailer = message[-TRAILER_BYTES:].view(torch.int64)
    trailer[:2].copy_(put(np.array([epoch, index], np.int64), message.device))
    trailer[2] = checksum_on_device(message[:num_bytes])


def inspect(message: Tensor, num_bytes: int) -> Tensor:
    """Return the trailer of a received message and the checksum of its data: [4] int64."""
    trailer = message[-TRAILER_BYTES:].view(torch.int64)
    return torch.cat((trailer, checksum_on_device(message[:num_bytes]).view(1)))


def verify(found: Sequence[int], epoch: int, index: int) -> str:
    """Return the reason why a message is invalid, or "" if it is valid.

    `found` is a result of `inspect`.

    Raises:
        PairBroken: The trailer is that of another message, so messages were lost or reordered.
    """
    sent_epoch, sent_index, sent, received = found
    if (sent_epoch, sent_index) != (epoch, index):
        raise PairBroken(
            f"a message came out of order: expected message {index} of transfer {epoch}, got "
            f"message {sent_index} of transfer {sent_epoch}"
        )
    return "" if sent == received else f"checksum mismatch in message {index}"
