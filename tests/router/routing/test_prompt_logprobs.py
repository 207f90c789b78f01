"""Logprobs of a prompt's tokens on their way through the life-cycle."""

from collections.abc import Sequence

from penstock.router.routing.events import (
    Command,
    DeliverPrompt,
    Drop,
    ScoredPrompt,
    Stepped,
    Submit,
    WorkerLost,
    Yielded,
)
from tests.support.router_harness import D, M, N, P, Router, submits


def scored(worker: str, attempt: int, first: int, last: int) -> Stepped:
    entries = [f"{position}" for position in range(first, last)]
    return Stepped(worker, [], prompts=[ScoredPrompt(1, attempt, first, entries)])


def prompt_of(commands: Sequence[Command]) -> list[object]:
    return [entry for c in commands if isinstance(c, DeliverPrompt) for entry in c.logprobs]


def test_logprobs_of_a_prompt_come_once_whatever_dies() -> None:
    router = Router(M, N)
    ((first, _, _),) = submits(router.arrive(num_prompt=9))
    second = "n" if first == "m" else "m"
    assert prompt_of(router(scored(first, 1, 1, 4))) == ["1", "2", "3"]
    assert prompt_of(router(scored(second, 1, 4, 6))) == []  # it is not the one that runs it
    again = [c for c in router(WorkerLost(first)) if isinstance(c, Submit)]
    assert [(c.worker, c.attempt, c.prompt_known) for c in again] == [(second, 2, 4)]
    assert prompt_of(router(scored(second, 1, 1, 9))) == []
    assert prompt_of(router(scored(second, 2, 2, 7))) == ["4", "5", "6"]
    assert prompt_of(router(scored(second, 2, 7, 9))) == ["7", "8"]


def test_a_gap_in_a_prompts_logprobs_fails_the_attempt() -> None:
    router = Router(M)
    router.arrive(num_prompt=9)
    commands = router(scored("m", 1, 3, 5))
    assert prompt_of(commands) == []
    assert submits(commands) == [("m", 1, 2)]


def test_scores_from_one_that_waits_for_blocks_say_that_it_runs() -> None:
    router = Router(P, D)
    router.arrive(num_prompt=9)
    router.step("p", 1, 0)
    commands = router(Yielded("p", 1, 1, 9))
    assert submits(commands) == [("d", 1, 2)]
    commands = router(scored("d", 2, 1, 3))
    assert prompt_of(commands) == ["1", "2"]
    assert Drop("p", 1, 1) in commands
