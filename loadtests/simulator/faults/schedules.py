"""Fault schedules: workers, requests and faults with their times, generated from one seed.

Each request and each fault has its own random generator, so that removing some requests or faults
does not change the others. Constraints have separate generators. Schedules without constraints are
therefore the same as before constraints were introduced.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from random import Random

from penstock.common.sampling_params import SamplingParams
from penstock.common.structured_outputs import StructuredOutputs
from penstock.common.thinking_budget import ThinkingBudget
from penstock.loadtests.simulator.constraints.random_constraints import draw_constraint
from penstock.loadtests.simulator.constraints.vocabulary import END
from penstock.loadtests.simulator.model.hash_model import VOCAB

ROLES = (
    ("prefill", "decode"),
    ("prefill", "decode"),
    ("prefill", "decode", "decode"),
    ("prefill", "prefill", "decode", "decode"),
    ("mixed", "mixed"),
    ("prefill", "decode", "mixed"),
    ("mixed",),
    ("decode", "decode"),
)
BLOCK_SIZE = 4
MAX_MODEL_LEN = 64
FAULT_SECONDS = 8.0
"""Latest start of a fault, in seconds."""


CONSTRAINED_SCHEDULES = 0.3
"""Share of the schedules in which some requests have a constraint."""


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    name: str
    role: str
    layout: str
    num_blocks: int
    max_sequences: int
    max_batched_tokens: int
    max_queued: int
    step_seconds: float
    token_seconds: float
    write_seconds: float  # seconds to write the blocks of one message
    message_blocks: int  # maximum number of blocks in a message
    max_forced: int  # maximum forced tokens that a sequence takes in one step
    forced_per_other_row: float


@dataclass(frozen=True, slots=True)
class RequestPlan:
    number: int
    at: float
    router: int  # index of the router that first gets the request
    prompt: tuple[int, ...]
    max_tokens: int
    stop_tokens: tuple[int, ...]
    num_choices: int
    salt: bytes
    tenant: str
    priority: int
    deadline: float  # time limit, in seconds from the request's arrival
    cut: int  # number of tokens after which a stop string matches; 0 means never
    leaves_after: float  # seconds from arrival until the client disconnects, or infinity
    # Seconds from the start of a KV transfer of the request until its client disconnects.
    leaves_moving: float
    resumes: bool  # whether the client resubmits to another router if its router dies
    constraint: StructuredOutputs | None = None
    min_tokens: int = 0
    thinking_budget: ThinkingBudget | None = None

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            stop_token_ids=self.stop_tokens,
            structured_outputs=self.constraint,
            thinking_budget=self.thinking_budget,
        )


@dataclass(frozen=True, slots=True)
class Fault:
    number: int
    at: float
    kind: str
    one: int  # index of the worker or, for a router fault, of the router
    other: int  # for a network fault, the index of the second process
    seconds: float  # duration of the fault in seconds
    # "slow": step times are multiplied by 1 + 10 x size; "delay": additional latency in seconds.
    size: float

    def __str__(self) -> str:
        return (
            f"fault {self.number} at {self.at:.3f} s: {self.kind} {self.one} {self.other} "
            f"for {self.seconds:.3f} s ({self.size:.2f})"
        )


KINDS = (
    *("kill", "kill", "lose", "hang", "slow"),
    *("cut stream", "cut blocks", "delay stream", "delay blocks"),
    *("reorder stream", "duplicate stream"),
    *("reorder blocks", "duplicate blocks", "late blocks", "late blocks", "corrupt blocks"),
    *("drain", "kill router", "hang router", "stuck"),
    *("role prefill", "role decode", "role mixed"),
    *("lose events", "repeat events", "forge events"),
)

VARIANTS = {
    "lose events": ("lose events", "omit events"),
    "forge events": ("forge events", "corrupt events"),
}
"""Kinds of faults that may replace a kind of `KINDS`; see `CacheStream.add_fault`. They are drawn
with a separate generator, so that all other faults remain the same."""


@dataclass(frozen=True, slots=True)
class Schedule:
    seed: int
    num_routers: int
    latency: float
    bandwidth: float
    max_queued: int  # maximum number of queued requests of each router
    ttft_slo_seconds: float  # SLO of the queue order; 0 means order of arrival
    # Whether routers learn step times, which some placement decisions need.
    reports_step_seconds: bool
    same_machine: bool  # whether all workers share the cores of one machine
    # SLO of the time per token, which limits the prompt tokens of a step; 0 means no SLO
    tpot_slo_seconds: float
    workers: tuple[WorkerPlan, ...]
    requests: tuple[RequestPlan, ...]
    faults: tuple[Fault, ...]

    def only(
        self, requests: Collection[int] | None = None, faults: Collection[int] | None = None
    ) -> "Schedule":
        """Return a copy with only the requests and faults of these numbers.

        None keeps all of them.
        """
        kept = tuple(one for one in self.requests if requests is None or one.number in requests)
        left = tuple(one for one in self.faults if faults is None or one.number in faults)
        return replace(self, requests=kept, faults=left)


def schedule_of(seed: int) -> Schedule:
    """Generate the schedule of a seed. Equal seeds give equal schedules."""
    rng = Random(f"schedule {seed}")
    roles = rng.choice(ROLES)
    num_routers = rng.choice((1, 1, 1, 2))
    tight = rng.random() < 0.4
    num_requests, num_faults = rng.randint(2, 16), rng.choice((0, 1, 2, 3, 4, 6, 9))
    return Schedule(
        seed=seed,
        num_routers=num_routers,
        latency=rng.choice((0.0002, 0.001, 0.01)),
        bandwidth=rng.choice((1e7, 1e8, 1e10)),
        max_queued=rng.choice((4, 100)),
        ttft_slo_seconds=0.5 * (seed % 2),
        reports_step_seconds=seed // 2 % 2 == 1,
        same_machine=seed // 4 % 4 == 1,
        tpot_slo_seconds=0.05 * (seed // 16 % 2),
        workers=tuple(_worker(seed, rng, i, role, tight) for i, role in enumerate(roles)),
        requests=tuple(
            _limited(seed, _constrained(seed, _request(seed, i, num_routers)))
            for i in range(num_requests)
        ),
        faults=tuple(_fault(seed, i, len(roles), num_routers) for i in range(num_faults)),
    )


def _worker(seed: int, rng: Random, number: int, role: str, tight: bool) -> WorkerPlan:
    forced = Random(f"forced {seed} {number}")
    return WorkerPlan(
        name=f"{role[0]}{number}",
        role=role,
        layout="other" if rng.random() < 0.05 else "same",
        num_blocks=rng.choice((18, 22, 30) if tight else (64, 96)),
        max_sequences=rng.choice((2, 4, 6)),
        max_batched_tokens=rng.choice((8, 16, 64)),
        max_queued=rng.choice((1, 3, 100)),
        step_seconds=rng.choice((0.005, 0.02, 0.05)),
        token_seconds=rng.choice((0.0, 0.0005)),
        write_seconds=rng.choice((0.001, 0.02, 0.2)),
        message_blocks=rng.choice((1, 2, 8)),
        max_forced=forced.choice((0, 1, 2, 16)),
        forced_per_other_row=forced.choice((0.0, 0.0, 4.0)),
    )


def _request(seed: int, number: int, num_routers: int) -> RequestPlan:
    rng = Random(f"request {seed} {number}")
    stem = Random(rng.choice("ab")).choices(range(37), k=rng.choice((0, 4, 9, 20)))
    own = [rng.randrange(37) for _ in range(rng.choice((1, 3, 8, 20)))]
    num_choices = rng.choice((1, 1, 1, 1, 2, 3))
    return RequestPlan(
        number=number,
        at=rng.uniform(0.0, rng.choice((1.0, 5.0))) if rng.random() < 0.7 else 0.5,
        router=rng.randrange(num_routers),
        prompt=(*stem, *own),
        max_tokens=rng.choice((1, 5, 12, 23, 23)),
        stop_tokens=(rng.randrange(37),) if rng.random() < 0.4 else (),
        num_choices=num_choices,
        salt=rng.choice((b"", b"", b"t")),
        tenant=rng.choice("ab"),
        priority=rng.choice((0, 0, 0, 1)),
        deadline=rng.choice((3.0, 10.0)) if rng.random() < 0.15 else float("inf"),
        cut=rng.randint(1, 8) if rng.random() < 0.2 else 0,
        leaves_after=rng.uniform(0.0, rng.choice((0.5, 3.0)))
        if rng.random() < 0.25
        else float("inf"),
        leaves_moving=rng.choice((0.01, 0.1, 0.4)) if rng.random() < 0.15 else float("inf"),
        # A client cannot resume several choices, since it cannot tell the router which have ended.
        resumes=rng.random() < 0.7 and num_choices == 1,
    )


def _constrained(seed: int, plan: RequestPlan) -> RequestPlan:
    """Return the request, with a constraint if both the schedule and the request draw one."""
    rng = Random(f"constraint {seed} {plan.number}")
    if Random(f"constraints {seed}").random() >= CONSTRAINED_SCHEDULES or rng.random() < 0.4:
        return plan
    return replace(
        plan,
        constraint=draw_constraint(rng),
        stop_tokens=(END,),
        max_tokens=rng.choice((5, 23, 40)),
        min_tokens=rng.choice((0, 0, 0, 4)),
    )


def _limited(seed: int, plan: RequestPlan) -> RequestPlan:
    """Return the request, with a thinking budget if it draws one and has no constraint."""
    rng = Random(f"thinking {seed} {plan.number}")
    if plan.constraint is not None or rng.random() < 0.8:
        return plan
    start = rng.choice(((), (rng.randrange(VOCAB),)))
    budget = ThinkingBudget(rng.choice((0, 2, 7)), rng.randrange(VOCAB), start)
    return replace(plan, thinking_budget=budget)


def _fault(seed: int, number: int, num_workers: int, num_routers: int) -> Fault:
    rng = Random(f"fault {seed} {number}")
    kind = rng.choice(KINDS)
    kind = Random(f"variant {seed} {number}").choice(VARIANTS.get(kind, (kind,)))
    others = num_routers if kind.endswith(("stream", "events")) else num_workers
    return Fault(
        number=number,
        at=rng.uniform(0.0, FAULT_SECONDS if rng.random() < 0.5 else 2.0),
        kind=kind,
        one=rng.randrange(num_routers if "router" in kind else num_workers),
        other=rng.randrange(others),
        seconds=rng.choice((0.05, 0.5, 3.0, 7.0, 12.0)),
        size=rng.choice((0.01, 0.1, 1.0)),
    )
