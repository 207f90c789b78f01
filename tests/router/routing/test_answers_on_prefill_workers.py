"""Answers that prefill workers generate, and that later move to decode workers."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.dispatcher import DispatcherLimits
from penstock.router.routing.events import Command, Ready, Stepped, Submit, Tick, Yield
from tests.support.columns import columns_of
from tests.support.router_harness import AT, D, P, Router, submits


class Fleet(Router):
    """A router with one prefill and one decode worker, whose speeds are measured.

    Args:
        limits: limits of the dispatcher.
        machine: machine whose cores the workers share; empty if they do not share cores.
    """

    def __init__(self, limits: DispatcherLimits | None = None, machine: str = "") -> None:
        super().__init__(*(replace(info, machine=machine) for info in (P, D)), limits=limits)
        self.loads = {name: WorkerLoad() for name in "pd"}
        for length in (100, 1000, 5000):
            self.dispatcher.transfer_costs.add(length, 100 * length, 0.01 + 1e-5 * length)
        self.prompts("p", 10.0)

    def report(self, worker: str, **changes: Any) -> list[Command]:
        self.loads[worker] = load = self.loads[worker]._replace(**changes)
        return self(Stepped(worker, columns_of([]), load))

    def prompts(self, worker: str, seconds: float) -> None:
        """Let a worker compute prompts for `seconds`, 1,000 tokens per second."""
        load = self.loads[worker]
        self.now += seconds
        self.report(
            worker,
            prompt_seconds=load.prompt_seconds + seconds,
            prompt_tokens_computed=load.prompt_tokens_computed + int(1000 * seconds),
            num_steps=load.num_steps + 1,
            step_seconds=load.step_seconds + seconds,
        )

    def decode(self, worker: str, running: int, seconds: float, count: int = 20) -> None:
        """Let a worker run decode steps of `running` sequences, `seconds` each."""
        for _ in range(count):
            load = self.loads[worker]
            self.report(
                worker,
                running=running,
                num_steps=load.num_steps + 1,
                step_seconds=load.step_seconds + seconds,
            )


def busy_decode_worker(
    limits: DispatcherLimits | None = None, machine: str = ""
) -> tuple[Fleet, list[Command]]:
    """Return a router and the placement of a request that arrived while d was slow and busy."""
    router = Fleet(limits, machine)
    router.decode("p", 1, 0.02)
    router.report("p", running=0)
    router.wait(30.0, "p", "d")  # for 30 s, the prefill worker computes no prompts
    router.decode("d", 3, 0.2)
    return router, router.arrive(1, max_tokens=500)


def test_idle_prefill_worker_generates_the_answer_if_decode_workers_are_slow() -> None:
    router, commands = busy_decode_worker()
    (submit,) = (each for each in commands if isinstance(each, Submit))
    assert (submit.worker, submit.yield_after) == ("p", 0)
    assert router.dispatcher.num_prefill_decisions["together: answer"] == 1


def let_prompts_delay_the_answer(router: Fleet) -> None:
    """Let the decode worker become idle, and the prefill worker compute prompts for 30 s."""
    router.step("p", 1, 0)
    assert submits(router(Tick())) == []
    router.decode("d", 1, 0.02, count=300)
    router.report("d", running=0)
    router.wait(0.5, "p", "d")
    assert router.dispatcher.num_returned == 0
    router.prompts("p", 30.0)
    router.wait(0.5, "p", "d")


def test_answer_returns_to_a_decode_worker_when_prompts_delay_it() -> None:
    router, _ = busy_decode_worker()
    let_prompts_delay_the_answer(router)
    assert router.dispatcher.num_returned == 1
    yields = router(Ready("d", 1, 2, 1, 0, AT))
    assert [(each.worker, each.request) for each in yields if isinstance(each, Yield)] == [("p", 1)]


@pytest.mark.parametrize("slo_seconds", [0.0, 0.03])
def test_answer_does_not_move_between_workers_that_share_cores(slo_seconds: float) -> None:
    """Prompts would slow the answer down on the decode worker too."""
    router, _ = busy_decode_worker(DispatcherLimits(tpot_slo_seconds=slo_seconds), "here")
    let_prompts_delay_the_answer(router)
    assert router.dispatcher.num_returned == 0


def test_answer_returns_if_it_misses_only_there_its_time_per_token() -> None:
    for slo, expected in ((0.0, 0), (0.0195, 1), (0.015, 0)):
        router, _ = busy_decode_worker(DispatcherLimits(tpot_slo_seconds=slo))
        router.step("p", 1, 0)
        router.decode("d", 1, 0.019, count=900)
        router.report("d", running=0)
        router.decode("p", 1, 0.0195, count=300)
        router.wait(0.5, "p", "d")
        assert router.dispatcher.num_returned == expected, slo
