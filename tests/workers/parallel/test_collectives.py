"""Collectives of ranks in threads: sums in both orders, gathers, exchanges and broadcasts."""

import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from penstock.workers.parallel.collectives import (
    SMALL_BYTES,
    ProcessGroup,
    RankLost,
    make_process_group,
)
from penstock.workers.parallel.communicator import backend_for
from penstock.workers.parallel.rendezvous import LocalStore
from tests.support.ranks import in_threads

T = TypeVar("T")

CPU = torch.device("cpu")
RANKS = 3


def run_ranks(work: Callable[[int, ProcessGroup], T], seconds: float = 20.0) -> list[T]:
    def one(rank: int, store: LocalStore) -> T:
        ranks = tuple(range(RANKS))
        return work(rank, make_process_group(store, ranks, rank, CPU, "127.0.0.1", seconds))

    return in_threads(RANKS, one)


def rank_values(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values of very different magnitudes, so that their sum depends on the order."""
    numbers = torch.Generator().manual_seed(rank)
    scale = 10.0 ** torch.randint(-4, 5, (rows, 48), generator=numbers)
    return (torch.randn(rows, 48, generator=numbers) * scale).to(dtype)


def sum_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(parts[0].shape)
    for each in parts:
        total = total + each.float()
    return total.to(parts[0].dtype)


def test_all_reduce_sums_in_rank_order_for_all_sizes() -> None:
    above_small = SMALL_BYTES // (48 * 2) + 1
    cases = [
        (rows, dtype) for dtype in (torch.float32, torch.bfloat16) for rows in (1, 7, above_small)
    ]

    def work(rank: int, group: ProcessGroup) -> list[torch.Tensor]:
        return [group.all_reduce(rank_values(rank, rows, dtype)) for rows, dtype in cases]

    found = run_ranks(work)
    for number, (rows, dtype) in enumerate(cases):
        parts = [rank_values(rank, rows, dtype) for rank in range(RANKS)]
        expected = sum_in_order(parts)
        if dtype == torch.float32 and rows > 1:
            assert not torch.equal(expected, sum_in_order(parts[::-1])), (
                "the order must affect the sum"
            )
        for rank in range(RANKS):
            assert torch.equal(found[rank][number], expected)


def test_all_reduce_of_a_row_does_not_depend_on_the_number_of_rows() -> None:
    many = SMALL_BYTES // (48 * 4) + 5

    def work(rank: int, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        whole = rank_values(rank, many, torch.float32)
        return group.all_reduce(whole), group.all_reduce(whole[3:4])

    for whole, row in run_ranks(work):
        assert torch.equal(whole[3:4], row)


def test_all_to_all_sends_each_row_to_its_target() -> None:
    sent = [[1, 0, 2], [2, 0, 0], [0, 0, 3]]

    def work(rank: int, group: ProcessGroup) -> torch.Tensor:
        targets = [to for to, count in enumerate(sent[rank]) for _ in range(count)]
        rows = torch.tensor([[rank, to] for to in targets], dtype=torch.bfloat16).view(-1, 2)
        return group.all_to_all(rows, sent[rank], [counts[rank] for counts in sent])

    for rank, rows in enumerate(run_ranks(work)):
        expected = [[source, rank] for source in range(RANKS) for _ in range(sent[source][rank])]
        assert rows.tolist() == expected


def test_all_gather_returns_parts_in_rank_order() -> None:
    found = run_ranks(lambda rank, group: group.all_gather(torch.full((2, 3), rank)))
    for parts in found:
        assert parts[:, 0, 0].tolist() == list(range(RANKS))


def test_broadcast_copies_the_tensor_of_the_first_rank() -> None:
    def work(rank: int, group: ProcessGroup) -> torch.Tensor:
        given = torch.arange(5, dtype=torch.int32) + 100 * rank
        found = group.broadcast(given)
        assert found is given
        return found

    for found in run_ranks(work):
        assert found.tolist() == [0, 1, 2, 3, 4]


def test_all_reduce_in_the_communicators_order_is_equal_on_all_ranks() -> None:
    cases = [(rows, dtype) for dtype in (torch.float32, torch.bfloat16) for rows in (1, 7)]

    def one(rank: int, store: LocalStore) -> list[torch.Tensor]:
        group = make_process_group(
            store, tuple(range(RANKS)), rank, CPU, "127.0.0.1", 20.0, in_rank_order=False
        )
        given = [rank_values(rank, rows, dtype) for rows, dtype in cases]
        kept = [tensor.clone() for tensor in given]
        found = [group.all_reduce(tensor) for tensor in given]
        assert all(torch.equal(*pair) for pair in zip(given, kept, strict=True))
        # Taking every other row gives a view that is not contiguous.
        return [*found, group.all_reduce(given[1][::2])]

    found = in_threads(RANKS, one)
    for number, (rows, dtype) in enumerate([*cases, (7, torch.float32)]):
        parts = [rank_values(rank, rows, dtype).float() for rank in range(RANKS)]
        exact = torch.stack(parts).double().sum(0)
        if number == len(cases):
            exact, parts = exact[::2], [part[::2] for part in parts]
        rounding = torch.finfo(dtype).eps * torch.stack(parts).abs().sum(0) * RANKS
        for each in found:
            assert torch.equal(each[number], found[0][number])
            assert ((each[number].double() - exact).abs() <= rounding).all()


def test_missing_rank_fails_the_other_ranks() -> None:
    finished = threading.Event()

    def work(rank: int, group: ProcessGroup) -> str:
        if rank == 1:
            finished.wait(20)
            return ""
        try:
            group.all_reduce(torch.ones(4))
        except RankLost as error:
            return str(error)
        finally:
            if rank == 0:
                finished.set()
        return "no"

    first, _, last = run_ranks(work, seconds=0.5)
    assert first not in ("", "no")
    assert last not in ("", "no")


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_cuda_tensors_use_nccl_and_cpu_tensors_gloo(device: str, backend: str) -> None:
    assert backend_for(torch.device(device)) == backend
