"""The number of cached prompt tokens: the first worker's number counts, and is delivered once."""

from collections.abc import Sequence

from penstock.router.routing.events import (
    ClientDisconnected,
    Command,
    Deliver,
    DeliverPrompt,
    Stepped,
    TokenColumns,
    WorkerLost,
    Yielded,
)
from tests.support.columns import NewToken, columns_of
from tests.support.router_harness import D, M, N, P, Router, submits


def admitted(worker: str, attempt: int, num_tokens: int) -> Stepped:
    return Stepped(worker, TokenColumns(), cached=[(1, attempt, num_tokens)])


def numbers_in(commands: Sequence[Command]) -> list[int]:
    return [
        command.num_cached
        for command in commands
        if isinstance(command, DeliverPrompt) and command.num_cached is not None
    ]


def test_number_is_delivered_before_the_tokens_of_the_same_step() -> None:
    router = Router(M)
    router.arrive(num_prompt=9)
    first = columns_of([NewToken(1, 1, 0, 0, 5)])
    commands = router(Stepped("m", first, cached=[(1, 1, 8)]))
    assert [type(command) for command in commands] == [DeliverPrompt, Deliver]
    assert numbers_in(commands) == [8]


def test_number_is_at_most_the_length_of_the_prompt() -> None:
    router = Router(M)
    router.arrive(num_prompt=9)
    assert numbers_in(router(admitted("m", 1, 1000))) == [9]


def test_request_that_is_admitted_again_keeps_its_first_number() -> None:
    router = Router(M)
    router.arrive(num_prompt=9)
    assert numbers_in(router(admitted("m", 1, 0))) == [0]
    assert numbers_in(router(admitted("m", 1, 8))) == []


def test_number_does_not_change_when_another_worker_takes_over() -> None:
    router = Router(M, N)
    ((first, _, _),) = submits(router.arrive(num_prompt=9))
    second = "n" if first == "m" else "m"
    assert numbers_in(router(admitted(first, 1, 4))) == [4]
    router.step(first, 1, 0)
    assert submits(router(WorkerLost(first))) == [(second, 1, 2)]
    assert numbers_in(router(admitted(second, 2, 8))) == []


def test_number_of_the_next_worker_counts_if_the_first_never_began() -> None:
    router = Router(M, N)
    ((first, _, _),) = submits(router.arrive(num_prompt=9))
    second = "n" if first == "m" else "m"
    router(WorkerLost(first))
    assert numbers_in(router(admitted(second, 1, 4))) == []  # attempt 1 belongs to the lost worker
    assert numbers_in(router(admitted(second, 2, 8))) == [8]


def test_transferred_blocks_do_not_count() -> None:
    router = Router(P, D)
    router.arrive(num_prompt=9)
    assert numbers_in(router(admitted("p", 1, 0))) == [0]
    router.step("p", 1, 0)
    assert submits(router(Yielded("p", 1, 1, 9))) == [("d", 1, 2)]
    assert numbers_in(router(admitted("d", 2, 8))) == []


def test_number_of_an_ended_request_is_ignored() -> None:
    router = Router(M)
    router.arrive(num_prompt=9)
    router(ClientDisconnected(1))
    assert router(admitted("m", 1, 8)) == []
