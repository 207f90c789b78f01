"""The dispatcher against fake workers, with events and faults in random order.

Every client receives the tokens of the reference model, each position once, or one final error. At
the end, no request and no block is left.
"""

from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from penstock.common.sampling_params import SamplingParams
from penstock.router.routing.dispatcher import DispatcherLimits
from penstock.router.routing.events import Request, RoleChanged, WorkerInfo
from tests.support.router_world import World, info_of

POOLS: dict[str, list[WorkerInfo]] = {
    "one of each": [info_of("p0", "prefill"), info_of("d0", "decode")],
    "pools": [
        info_of("p0", "prefill"),
        info_of("p1", "prefill"),
        info_of("d0", "decode"),
        info_of("d1", "decode"),
    ],
    "mixed": [info_of("m0", "mixed"), info_of("m1", "mixed")],
    "all kinds": [
        info_of("p0", "prefill"),
        info_of("d0", "decode", num_blocks=16),
        info_of("m0", "mixed", layout="M"),
        info_of("m1", "mixed", max_model_len=24),
    ],
    "prefill alone": [info_of("p0", "prefill")],
    "decode alone": [info_of("d0", "decode"), info_of("d1", "decode")],
    "nobody": [],
}


def request_of(rng: Random, number: int, now: float) -> Request:
    num_choices = rng.choice([1, 1, 1, 2, 3])
    num_beams = num_choices + 1 if rng.random() < 0.2 else 0
    log = [[1, 2]] * num_choices if rng.random() < 0.1 and not num_beams else []
    return Request(
        number,
        [rng.randrange(9973) for _ in range(rng.choice([1, 3, 8, 20]))],
        params=SamplingParams(),
        num_choices=num_choices,
        num_beams=num_beams,
        max_tokens=rng.choice([1, 2, 5, 12]),
        tenant=rng.choice("abc"),
        priority=rng.choice([0, 0, 1]),
        deadline=now + rng.choice([3.0, 30.0]) if rng.random() < 0.3 else float("inf"),
        log=log,
    )


class Chaos:
    """Random actions and faults on a world; tests select the actions by method name."""

    def __init__(self, world: World, loss_rate: float) -> None:
        self.world = world
        self.loss_rate = loss_rate  # probability that KV blocks are lost, applied before each event
        self.num_requests = 0
        self.known_workers: list[WorkerInfo] = [worker.info for worker in world.workers.values()]

    def arrive(self, rng: Random) -> None:
        self.num_requests += 1
        request = request_of(rng, self.num_requests, self.world.now)
        cuttable = range(0 if request.num_beams else request.num_choices)
        cuts = {i: rng.randint(1, 6) for i in cuttable if rng.random() < 0.3}
        self.world.arrive(request, cuts)

    def advance(self, rng: Random) -> None:
        if rng.random() < self.loss_rate:
            rng.choice([self.reclaim, self.fail_transfer, self.tear])(rng)
        moves = self.world.possible_actions()
        if moves:
            rng.choice(moves)()

    def advance_far(self, rng: Random) -> None:
        for _ in range(30):
            self.advance(rng)

    def leave(self, rng: Random) -> None:
        if self.num_requests:
            self.world.leave(rng.randint(1, self.num_requests))

    def wait(self, rng: Random) -> None:
        names = tuple(self.world.workers)
        silent = tuple(name for name in names if rng.random() < 0.1)
        self.world.wait(rng.choice([0.1, 0.5, 1.0, 1.9, 5.0]), silent)

    def kill(self, rng: Random) -> None:
        if self.world.workers:
            self.world.kill(rng.choice(list(self.world.workers)))

    def notice(self, rng: Random) -> None:
        dead = sorted(self.world.linked - set(self.world.workers))
        if dead:
            self.world.report_lost(rng.choice(dead))

    def birth(self, rng: Random) -> None:
        if self.known_workers:
            self.world.start_worker(rng.choice(self.known_workers))

    def drain(self, rng: Random) -> None:
        if self.world.workers:
            self.world.drain(rng.choice(list(self.world.workers)))

    def change_role(self, rng: Random) -> None:
        if self.known_workers:
            worker = rng.choice(self.known_workers).worker
            self.world.handle(RoleChanged(worker, rng.choice(["prefill", "decode", "mixed"])))

    def stick(self, rng: Random) -> None:
        if self.world.workers:
            self.world.make_stuck(rng.choice(list(self.world.workers)))

    def garble(self, rng: Random) -> None:
        if self.world.workers:
            self.world.skip_position(rng.choice(list(self.world.workers)))

    def reclaim(self, rng: Random) -> None:
        for worker in self.world.workers.values():
            for name in worker.in_phase("leased"):
                if rng.random() < 0.5:
                    worker.reclaim(name)

    def fail_transfer(self, rng: Random) -> None:
        for worker in self.world.workers.values():
            for name in worker.in_phase("reserved"):
                if rng.random() < 0.5:
                    worker.fail_transfer(name)

    def tear(self, rng: Random) -> None:
        for worker in self.world.workers.values():
            for transfer in list(worker.transfers):
                if rng.random() < 0.5:
                    self.world.deliver_blocks(worker, transfer, whole=False)

    def give_up(self, rng: Random) -> None:
        for worker in self.world.workers.values():
            running = worker.in_phase("running")
            if running and rng.random() < 0.3:
                worker.fail(rng.choice(running), "logits were not finite")


FAULTS = ["leave", "kill", "notice", "birth", "birth", "drain", "give_up", "garble", "stick"]
FAULTS += ["change_role", "change_role"]
QUIET = ["arrive", "wait", "advance", "advance_far", "advance_far"]


def world_of(pool: str, ttft_slo: float) -> World:
    limits = DispatcherLimits(6, 80, ttft_slo_seconds=ttft_slo, max_recovering_per_worker=1)
    return World(POOLS[pool], limits, max_queued=2)


@pytest.mark.slow
@pytest.mark.parametrize("pool", POOLS)
def test_answers_are_correct_under_random_schedules(pool: str) -> None:
    for seed in range(20):
        rng = Random(f"{pool} {seed}")
        world = world_of(pool, ttft_slo=0.5 * (seed % 2))
        chaos = Chaos(world, rng.choice([0.0, 0.1, 0.5]))
        names = QUIET * rng.randint(1, 6) + rng.sample(FAULTS, rng.randint(0, len(FAULTS)))
        for _ in range(60):
            getattr(chaos, rng.choice(names))(rng)
        chaos.world.run_until_idle(rng)
        chaos.world.check_rest()


def test_without_faults_all_transfers_succeed_and_no_prompt_is_recomputed() -> None:
    rng = Random(1)
    world = World(POOLS["pools"], DispatcherLimits())
    for number in range(40):
        world.arrive(Request(number, [number] * 9, SamplingParams(), max_tokens=6), {})
        for _ in range(rng.randint(0, 6)):
            if moves := world.possible_actions():
                rng.choice(moves)()
    world.run_until_idle(rng)
    world.check_rest()
    num_decoded = sum(len(client.expected()[0]) > 1 for client in world.clients.values())
    assert world.dispatcher.counters.num_transfers == num_decoded
    assert world.dispatcher.counters.num_transfers_failed == 0
    decoders = [world.workers["d0"], world.workers["d1"]]
    assert sum(worker.num_computed for worker in decoders) == 0


class DispatcherMachine(RuleBasedStateMachine):
    """Actions on a world, chosen by Hypothesis, which shrinks failing schedules."""

    @initialize(pool=st.sampled_from(sorted(POOLS)), ttft_slo=st.sampled_from([0.0, 0.5]))
    def begin(self, pool: str, ttft_slo: float) -> None:
        self.chaos = Chaos(world_of(pool, ttft_slo), 0.1)

    @rule(rng=st.randoms(use_true_random=False))
    def arrive(self, rng: Random) -> None:
        self.chaos.arrive(rng)

    @rule(rng=st.randoms(use_true_random=False))
    def advance(self, rng: Random) -> None:
        self.chaos.advance(rng)

    @rule(seed=st.integers(0, 1000))
    def advance_far(self, seed: int) -> None:
        self.chaos.advance_far(Random(seed))

    @rule(rng=st.randoms(use_true_random=False))
    def wait(self, rng: Random) -> None:
        self.chaos.wait(rng)

    @rule(fault=st.sampled_from(FAULTS), rng=st.randoms(use_true_random=False))
    def fault(self, fault: str, rng: Random) -> None:
        getattr(self.chaos, fault)(rng)

    def teardown(self) -> None:
        if hasattr(self, "chaos"):
            self.chaos.world.run_until_idle(Random(0))
            self.chaos.world.check_rest()


TestDispatcher = DispatcherMachine.TestCase
TestDispatcher.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
