"""Statistics of the runs: medians with quantiles, fractions of the machine's limits, speedups.

Times of different rounds are never compared, because the machine's speed varies. A speedup compares
times of the same round, and a fraction of a limit uses the limit that was measured just before the
run.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

from penstock.loadtests.comparison.checkpoints import Cost
from penstock.loadtests.comparison.engines import BY_NAME, Engine
from penstock.loadtests.comparison.work import EngineRun, Work
from penstock.loadtests.micro.ab_runner import Quantiles

PHASES = ("throughput", "tpot", "ttft")
UNITS = {"throughput": "output tokens/s", "tpot": "ms a token", "ttft": "ms"}


@dataclass(frozen=True, slots=True)
class Tokens:
    """Comparison of an engine's greedy tokens with those of its reference engine."""

    agreeing: int  # tokens before the first different token, summed over all answers
    total: int
    # Index of the first different token, the lowest of all answers; None if all tokens agree.
    first_divergence: int | None

    @classmethod
    def of(cls, answers: Sequence[Sequence[int]], judge: Sequence[Sequence[int]]) -> "Tokens":
        """Compare answers, [count][length], with the reference answers `judge`."""
        pairs = list(zip(answers, judge, strict=True))
        agreeing = [
            sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(*pair, strict=True)))
            for pair in pairs
        ]
        short = [index for index, pair in zip(agreeing, pairs, strict=True) if index < len(pair[0])]
        total = sum(len(tokens) for tokens, _ in pairs)
        return cls(sum(agreeing), total, min(short, default=None))


def batch_flops(cost: Cost, work: Work) -> float:
    """Return the FLOPs of all requests in the batch of the throughput phase."""
    one = cost.prefill(work.input_len) + cost.decode(work.input_len, work.output_len - 1)
    return work.requests * one


def value(run: EngineRun, work: Work, phase: str) -> float:
    """Return the result of a run in one phase, in the unit given by UNITS."""
    if phase == "throughput":
        return work.requests * work.output_len / run.batch
    if phase == "tpot":
        return 1000 * run.tpot(work)
    return 1000 * Quantiles.of(run.long).median


def limit(run: EngineRun, work: Work, cost: Cost, phase: str) -> float:
    """Return the best possible result within the measured limits of the machine (roofline)."""
    form = BY_NAME[run.engine].form
    names = ("gflops", "int8_gops") if form.has_int8_products else ("gflops",)
    arithmetic = 1e9 * max(run.limits[name] for name in names)
    memory = 1e9 * run.limits["memory_gbs"]
    weights = cost.weights_a_token * form.bytes_per_weight
    if phase == "throughput":
        return work.requests * work.output_len / (batch_flops(cost, work) / arithmetic)
    if phase == "tpot":
        per_token = cost.decode(work.input_len, work.stream_len) / work.stream_len
        return 1000 * max(weights / memory, per_token / arithmetic)
    return 1000 * max(cost.prefill(work.long_len) / arithmetic, weights / memory)


def reached(run: EngineRun, work: Work, cost: Cost, phase: str) -> float:
    """Return the run's result as a fraction of the machine's limit, where 1 is the limit itself."""
    got, most = value(run, work, phase), limit(run, work, cost, phase)
    return got / most if phase == "throughput" else most / got


def advantage(ours: EngineRun, other: EngineRun, work: Work, phase: str) -> float:
    """Return the speedup of `ours` over `other`; below 1 if `ours` is slower."""
    ratio = value(ours, work, phase) / value(other, work, phase)
    return ratio if phase == "throughput" else 1 / ratio


@dataclass(frozen=True, slots=True)
class Row:
    """Summary of all runs of one engine."""

    engine: Engine
    runs: list[EngineRun]
    values: dict[str, Quantiles]  # results of each phase, in the units of UNITS
    # Result as a fraction of the machine's limit, by phase.
    reached: dict[str, Quantiles]
    # Penstock's speedup over this engine, by phase; empty for Penstock itself.
    ahead: dict[str, Quantiles]
    tokens: Tokens | None
    memory_mib: float
    # Highest number of cores that other processes or the hypervisor took in a run.
    other_cores: float

    def as_json(self) -> dict[str, Any]:
        return {
            "values": {phase: asdict(quantiles) for phase, quantiles in self.values.items()},
            "fraction_of_limit": {
                phase: asdict(quantiles) for phase, quantiles in self.reached.items()
            },
            "speedup": {phase: asdict(quantiles) for phase, quantiles in self.ahead.items()},
            "tokens": asdict(self.tokens) if self.tokens else None,
            "memory_mib": self.memory_mib,
            "max_other_cores": self.other_cores,
        }


def summarize(rounds: Sequence[Sequence[EngineRun]], work: Work, cost: Cost) -> list[Row]:
    """Return one row per engine, in the order of ENGINES.

    `rounds` is indexed [round][engine].
    """
    runs = [run for each in rounds for run in each]
    names = [name for name in BY_NAME if any(run.engine == name for run in runs)]
    rows = []
    for name in names:
        mine = [run for run in runs if run.engine == name]
        rows.append(
            Row(
                engine=BY_NAME[name],
                runs=mine,
                values=_quantiles(lambda run, phase: value(run, work, phase), mine),
                reached=_quantiles(lambda run, phase: reached(run, work, cost, phase), mine),
                ahead=_ahead(rounds, work, BY_NAME[name]),
                tokens=_compared(BY_NAME[name], runs),
                memory_mib=max(run.memory_mib for run in mine),
                other_cores=max(run.other_cores + run.stolen_cores for run in mine),
            )
        )
    return rows


def _quantiles(
    figure: Callable[[EngineRun, str], float], runs: Sequence[EngineRun]
) -> dict[str, Quantiles]:
    return {phase: Quantiles.of([figure(run, phase) for run in runs]) for phase in PHASES}


def _ahead(
    rounds: Sequence[Sequence[EngineRun]], work: Work, other: Engine
) -> dict[str, Quantiles]:
    ours = other.counterpart
    if other.name == ours:
        return {}
    pairs = [
        (by_name[ours], by_name[other.name])
        for each in rounds
        if {ours, other.name} <= (by_name := {run.engine: run for run in each}).keys()
    ]
    if not pairs:
        return {}
    return {
        phase: Quantiles.of([advantage(*pair, work, phase) for pair in pairs]) for phase in PHASES
    }


def _tokens(runs: Sequence[EngineRun], name: str) -> list[list[int]]:
    return next((run.tokens for run in runs if run.engine == name and run.tokens), [])


def _compared(engine: Engine, runs: Sequence[EngineRun]) -> Tokens | None:
    answers, judge = _tokens(runs, engine.name), _tokens(runs, engine.reference)
    if engine.name == engine.reference or not (judge and answers):
        return None
    return Tokens.of(answers, judge)
