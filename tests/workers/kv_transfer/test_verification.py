import pytest
import torch

from penstock.workers.kv_transfer.transport import PairBroken
from penstock.workers.kv_transfer.verification import make_trailer, verify

DATA = torch.arange(1000, dtype=torch.float32)


def test_intact_message_has_no_problem() -> None:
    assert verify(make_trailer(7, 2, DATA), 7, 2, DATA) == ""


@pytest.mark.parametrize("at", [0, 500, 999])
def test_one_changed_bit_is_a_checksum_mismatch(at: int) -> None:
    trailer = make_trailer(7, 2, DATA)
    changed = DATA.clone()
    changed.view(torch.int32)[at] ^= 1
    assert verify(trailer, 7, 2, changed) == "checksum mismatch in message 2"


@pytest.mark.parametrize(("epoch", "index"), [(8, 2), (7, 3)])
def test_trailer_of_another_message_breaks_the_pair(epoch: int, index: int) -> None:
    with pytest.raises(PairBroken, match="expected message 2 of transfer 7"):
        verify(make_trailer(epoch, index, DATA), 7, 2, DATA)
