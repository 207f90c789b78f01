"""Delivery of prompt logprobs across worker loss, gaps and KV transfers."""

from collections.abc import Sequence

from penstock.router.routing.events import (
    Command,
    DeliverPrompt,
    Drop,
    ScoredPrompt,
    Stepped,
    Submit,
    TokenColumns,
    WorkerLost,
    Yielded,
)
from tests.support.router_harness import D, M, N, P, Router, submits


def scored(worker: str, attempt: int, first: int, last: int) -> Stepped:
    entries = [f"{position}" for position in range(first, last)]
    return Stepped(worker, TokenColumns(), prompts=[ScoredPrompt(1, attempt, first, entries)])


def logprobs_in(commands: Sequence[Command]) -> list[object]:
    return [entry for c in commands if isinstance(c, DeliverPrompt) for entry in c.logprobs]


def test_prompt_logprobs_are_delivered_once_across_a_worker_loss() -> None:
    router = Router(M, N)
    ((first, _, _),) = submits(router.arrive(num_prompt=9))
    second = "n" if first == "m" else "m"
    assert logprobs_in(router(scored(first, 1, 1, 4))) == ["1", "2", "3"]
    # The request still runs on `first`, so another worker's logprobs are ignored.
    assert logprobs_in(router(scored(second, 1, 4, 6))) == []
    again = [c for c in router(WorkerLost(first)) if isinstance(c, Submit)]
    assert [(c.worker, c.attempt, c.prompt_known) for c in again] == [(second, 2, 4)]
    assert logprobs_in(router(scored(second, 1, 1, 9))) == []
    assert logprobs_in(router(scored(second, 2, 2, 7))) == ["4", "5", "6"]
    assert logprobs_in(router(scored(second, 2, 7, 9))) == ["7", "8"]


def test_prompt_logprobs_after_the_prompt_are_ignored() -> None:
    router = Router(M)
    router.arrive(num_prompt=5)
    assert logprobs_in(router(scored("m", 1, 1, 9))) == ["1", "2", "3", "4"]
    assert logprobs_in(router(scored("m", 1, 5, 9))) == []


def test_gap_in_prompt_logprobs_fails_the_attempt() -> None:
    router = Router(M)
    router.arrive(num_prompt=9)
    commands = router(scored("m", 1, 3, 5))
    assert logprobs_in(commands) == []
    assert submits(commands) == [("m", 1, 2)]


def test_prompt_logprobs_from_a_waiting_worker_imply_that_it_runs() -> None:
    router = Router(P, D)
    router.arrive(num_prompt=9)
    router.step("p", 1, 0)
    commands = router(Yielded("p", 1, 1, 9))
    assert submits(commands) == [("d", 1, 2)]
    commands = router(scored("d", 2, 1, 3))
    assert logprobs_in(commands) == ["1", "2"]
    assert Drop("p", 1, 1) in commands
