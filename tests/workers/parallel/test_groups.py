"""What ranks do together, in threads: sums in the order of ranks, gathering, exchange."""

import threading
from collections.abc import Callable
from typing import TypeVar

import pytest
import torch

from penstock.workers.parallel.communicator import backend_for
from penstock.workers.parallel.groups import SMALL_BYTES, ProcessGroup, RankLost, make_process_group
from penstock.workers.parallel.rendezvous import LocalStore
from tests.support.ranks import in_threads

T = TypeVar("T")

CPU = torch.device("cpu")
RANKS = 3


def together(work: Callable[[int, ProcessGroup], T], seconds: float = 20.0) -> list[T]:
    def one(rank: int, store: LocalStore) -> T:
        ranks = tuple(range(RANKS))
        return work(rank, make_process_group(store, ranks, rank, CPU, "127.0.0.1", seconds))

    return in_threads(RANKS, one)


def part(rank: int, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers so different in size that the order of their sum shows."""
    numbers = torch.Generator().manual_seed(rank)
    scale = 10.0 ** torch.randint(-4, 5, (rows, 48), generator=numbers)
    return (torch.randn(rows, 48, generator=numbers) * scale).to(dtype)


def added_in_order(parts: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(parts[0].shape)
    for each in parts:
        total = total + each.float()
    return total.to(parts[0].dtype)


def test_sums_have_the_bits_of_the_order_of_ranks_whatever_their_size() -> None:
    most = SMALL_BYTES // (48 * 2) + 1
    cases = [(rows, dtype) for dtype in (torch.float32, torch.bfloat16) for rows in (1, 7, most)]

    def work(rank: int, group: ProcessGroup) -> list[torch.Tensor]:
        return [group.all_reduce(part(rank, rows, dtype)) for rows, dtype in cases]

    found = together(work)
    for number, (rows, dtype) in enumerate(cases):
        parts = [part(rank, rows, dtype) for rank in range(RANKS)]
        expected = added_in_order(parts)
        if dtype == torch.float32 and rows > 1:
            assert not torch.equal(expected, added_in_order(parts[::-1])), "the order shows"
        for rank in range(RANKS):
            assert torch.equal(found[rank][number], expected)


def test_a_row_s_sum_does_not_depend_on_how_many_rows_there_are() -> None:
    many = SMALL_BYTES // (48 * 4) + 5

    def work(rank: int, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        whole = part(rank, many, torch.float32)
        return group.all_reduce(whole), group.all_reduce(whole[3:4])

    for whole, row in together(work):
        assert torch.equal(whole[3:4], row)


def test_rows_go_where_they_are_sent() -> None:
    sent = [[1, 0, 2], [2, 0, 0], [0, 0, 3]]

    def work(rank: int, group: ProcessGroup) -> torch.Tensor:
        targets = [to for to, count in enumerate(sent[rank]) for _ in range(count)]
        rows = torch.tensor([[rank, to] for to in targets], dtype=torch.bfloat16).view(-1, 2)
        return group.all_to_all(rows, sent[rank], [counts[rank] for counts in sent])

    for rank, rows in enumerate(together(work)):
        expected = [[source, rank] for source in range(RANKS) for _ in range(sent[source][rank])]
        assert rows.tolist() == expected


def test_parts_are_gathered_in_order() -> None:
    found = together(lambda rank, group: group.all_gather(torch.full((2, 3), rank)))
    for parts in found:
        assert parts[:, 0, 0].tolist() == list(range(RANKS))


def test_a_rank_that_stays_away_is_noticed() -> None:
    gone = threading.Event()

    def work(rank: int, group: ProcessGroup) -> str:
        if rank == 1:
            gone.wait(20)
            return ""
        try:
            group.all_reduce(torch.ones(4))
        except RankLost as error:
            return str(error)
        finally:
            if rank == 0:
                gone.set()
        return "no"

    first, _, last = together(work, seconds=0.5)
    assert first not in ("", "no")
    assert last not in ("", "no")


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "nccl")])
def test_tensors_on_gpus_go_by_nccl(device: str, backend: str) -> None:
    assert backend_for(torch.device(device)) == backend
