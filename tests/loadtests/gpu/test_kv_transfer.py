"""The measured KV transfer between two processes, here over gloo: all bytes arrive."""

import threading
from unittest import mock

import numpy as np
import pytest
import torch

from penstock.loadtests.gpu import kv_transfer, lost_peer


@pytest.mark.process
def test_transferred_bytes_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    found = kv_transfer.measure("cpu", small=True)
    assert found["failures"] == []
    assert found["destination"]["same"]
    assert found["source"]["bytes"] == found["destination"]["bytes"] == 2 * 2 * 8 * 2 * 4 * 8 * 2


@pytest.mark.process
def test_destination_outlives_a_killed_source_and_receives_from_another() -> None:
    found = lost_peer.measure("cpu")
    assert found["failures"] == []
    assert found["gloo"]["first"]
    assert found["gloo"]["second"]
    assert found["gloo"]["error"]


def test_every_failure_of_the_destination_is_reported() -> None:
    fine = {"first": True, "error": "Timed out after 5 s", "second": True}
    assert lost_peer.failures_of(0, fine) == []
    assert lost_peer.failures_of(-6, fine) == ["the destination ended with -6: no report"]
    assert lost_peer.failures_of(1, {"raised": "TimeoutError: "}) == [
        "the destination ended with 1: TimeoutError: "
    ]
    assert lost_peer.failures_of(0, {"not_connected": "no"}) == [
        "the destination did not connect: no"
    ]
    assert lost_peer.failures_of(0, {"first": True, "second": False}) == [
        "the message of the second source did not arrive intact",
        "the receive from the killed source did not fail",
    ]


def test_a_refusal_of_nccl_on_one_gpu_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        def __init__(self, module: str, arguments: list[str], environment: dict[str, str]) -> None:
            self.figures = {"not_connected": "duplicate GPU"}
            self.reported, self.process = threading.Event(), mock.Mock()
            self.reported.set()

        def relay(self, peers: object) -> mock.Mock:
            return mock.Mock()

        def end(self, ends: float) -> int:
            return 0

    monkeypatch.setattr(lost_peer, "Child", Refused)
    found = lost_peer.run_processes(("cuda:0", "cuda:0"), hosts=True)
    assert found == {"not_run": "duplicate GPU", "failures": []}
    found = lost_peer.run_processes(("cuda:0", "cuda:1"), hosts=False)
    assert found["failures"] == ["the destination did not connect: duplicate GPU"]


def test_sides_make_equal_caches_and_use_different_block_numbers() -> None:
    one, same, other = (kv_transfer.kv_cache(torch.device("cpu"), True, seed) for seed in (0, 0, 1))
    assert torch.equal(one.view(torch.int16), same.view(torch.int16))
    assert not torch.equal(one.view(torch.int16), other.view(torch.int16))
    sent, received = kv_transfer.sides_blocks(16)
    assert len(set(sent.tolist())) == len(set(received.tolist())) == 8
    assert not np.array_equal(sent, received)
