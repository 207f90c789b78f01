"""Message buffers are reused, and bounded in total and for each pair."""

import pytest
import torch

from penstock.workers.kv_transfer.buffers import BufferRing

CPU = torch.device("cpu")


def addresses(buffers: list[torch.Tensor | None]) -> list[int]:
    return [buffer.data_ptr() for buffer in buffers if buffer is not None]


def test_buffers_are_reused_and_never_shared() -> None:
    ring: BufferRing[str] = BufferRing(64, CPU, num_buffers=3, max_per_user=3)
    taken = [ring.take("a") for _ in range(3)]
    assert len(set(addresses(taken))) == 3
    assert ring.take("a") is None
    for buffer in taken:
        assert buffer is not None
        assert buffer.shape == (64,)
        ring.give_back("a", buffer)
    again = [ring.take("a") for _ in range(3)]
    assert set(addresses(again)) == set(addresses(taken))


def test_pair_that_has_its_share_leaves_buffers_to_others() -> None:
    ring: BufferRing[str] = BufferRing(8, CPU, num_buffers=3, max_per_user=2)
    stalled = [ring.take("stalled") for _ in range(2)]
    assert None not in stalled
    assert ring.take("stalled") is None
    other = ring.take("other")
    assert other is not None
    assert ring.take("other") is None
    ring.give_back("other", other)
    assert ring.take("third") is not None


@pytest.mark.parametrize("num_discarded", [1, 5])
def test_discarded_buffer_is_replaced_by_other_memory(num_discarded: int) -> None:
    ring: BufferRing[str] = BufferRing(8, CPU, num_buffers=1, max_per_user=1)
    kept = []
    for _ in range(num_discarded):
        buffer = ring.take("a")
        assert buffer is not None
        kept.append(buffer)
        ring.discard("a")
    assert ring.take("b") is not None
    assert len(set(addresses(list(kept)))) == num_discarded


def test_failed_allocation_loses_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    ring: BufferRing[str] = BufferRing(8, CPU, num_buffers=1, max_per_user=1)

    def fail(*args: object, **options: object) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", fail)
        with pytest.raises(RuntimeError, match="allocate"):
            ring.take("a")
    assert ring.take("a") is not None
