"""The measured KV transfer between two processes, here over gloo: all bytes arrive."""

import numpy as np
import pytest
import torch

from penstock.loadtests.gpu import kv_transfer


@pytest.mark.process
def test_transferred_bytes_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kv_transfer.measure("cpu", small=True)
    assert found["failures"] == []
    assert found["destination"]["same"]
    assert found["source"]["bytes"] == found["destination"]["bytes"] == 2 * 2 * 8 * 2 * 4 * 8 * 2


def test_sides_make_equal_caches_and_use_different_block_numbers() -> None:
    one, same, other = (kv_transfer.kv_cache(torch.device("cpu"), True, seed) for seed in (0, 0, 1))
    assert torch.equal(one.view(torch.int16), same.view(torch.int16))
    assert not torch.equal(one.view(torch.int16), other.view(torch.int16))
    sent, received = kv_transfer.sides_blocks(16)
    assert len(set(sent.tolist())) == len(set(received.tolist())) == 8
    assert not np.array_equal(sent, received)
