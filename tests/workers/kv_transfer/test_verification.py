"""A message is accepted only if its trailer has the right epoch, index and checksum."""

import pytest
import torch

from penstock.workers.kv_transfer.transport import PairBroken
from penstock.workers.kv_transfer.verification import inspect, message_bytes, seal, verify


def sealed(num_bytes: int = 4000) -> torch.Tensor:
    """Return message number 2 of transfer 7."""
    generator = torch.Generator().manual_seed(1)
    size = message_bytes(num_bytes)
    message = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
    seal(message, num_bytes, 7, 2)
    return message


def problem(message: torch.Tensor, num_bytes: int = 4000, epoch: int = 7, index: int = 2) -> str:
    return verify(inspect(message, num_bytes).tolist(), epoch, index)


@pytest.mark.parametrize("num_bytes", [1, 8, 3999, 4000])
def test_intact_message_has_no_problem(num_bytes: int) -> None:
    assert problem(sealed(num_bytes), num_bytes) == ""


@pytest.mark.parametrize("at", [0, 2000, 3999, -1])
def test_one_changed_bit_of_data_or_checksum_is_a_mismatch(at: int) -> None:
    message = sealed()
    message[at] ^= 1
    assert problem(message) == "checksum mismatch in message 2"


def test_padding_is_not_part_of_the_data() -> None:
    message = sealed(3999)
    message[3999] ^= 1
    assert problem(message, 3999) == ""


@pytest.mark.parametrize(("epoch", "index"), [(8, 2), (7, 3)])
def test_trailer_of_another_message_breaks_the_pair(epoch: int, index: int) -> None:
    with pytest.raises(PairBroken, match=f"expected message {index} of transfer {epoch}"):
        problem(sealed(), 4000, epoch, index)
