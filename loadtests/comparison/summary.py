"""Statistics of the runs: medians with quantiles, fractions of the machine's limits, speedups.

Times of different rounds are never compared, since the machine's speed varies: a speedup is
computed within one round, and a fraction of a limit uses the limit measured just before the run.
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
REFERENCE = "transformers"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Agreement of an engine's greedy tokens with those of transformers."""

    agreeing: int  # tokens before the first difference, summed over all answers
    total: int
    first_divergence: int | None  # smallest index of a difference in any answer; None: all equal

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
    """Return the FLOPs of the whole batch of the throughput phase."""
    one = cost.prefill(work.input_len) + cost.decode(work.input_len, work.output_len - 1)
    return work.requests * one


def value(run: EngineRun, work: Work, phase: str) -> float:
    """Return the result of a run for a phase, in the unit given by UNITS."""
    if phase == "throughput":
        return work.requests * work.output_len / run.batch
    if phase == "tpot":
        return 1000 * run.tpot(work)
    return 1000 * Quantiles.of(run.long).median


def limit(run: EngineRun, work: Work, cost: Cost, phase: str) -> float:
    """Return the best result that the machine's measured limits allow (roofline)."""
    int8 = bool(BY_NAME[run.engine].quantization)
    names = ("gflops", "int8_gops") if int8 else ("gflops",)
    arithmetic = 1e9 * max(run.limits[name] for name in names)
    memory = 1e9 * run.limits["memory_gbs"]
    weights = cost.bytes_a_token / (4 if int8 else 1)
    if phase == "throughput":
        return work.requests * work.output_len / (batch_flops(cost, work) / arithmetic)
    if phase == "tpot":
        per_token = cost.decode(work.input_len, work.stream_len) / work.stream_len
        return 1000 * max(weights / memory, per_token / arithmetic)
    return 1000 * max(cost.prefill(work.long_len) / arithmetic, weights / memory)


def reached(run: EngineRun, work: Work, cost: Cost, phase: str) -> float:
    """Return the fraction of the limit that the run reached; 1 is the limit."""
    got, most = value(run, work, phase), limit(run, work, cost, phase)
    return got / most if phase == "throughput" else most / got


def advantage(ours: EngineRun, other: EngineRun, work: Work, phase: str) -> float:
    """Return the speedup of `ours` over `other`; below 1, ours is slower."""
    ratio = value(ours, work, phase) / value(other, work, phase)
    return ratio if phase == "throughput" else 1 / ratio


@dataclass(frozen=True, slots=True)
class Row:
    """Summary of one engine."""

    engine: Engine
    runs: list[EngineRun]
    values: dict[str, Quantiles]  # by phase, as the following two
    reached: dict[str, Quantiles]  # fraction of the machine's limit
    ahead: dict[str, Quantiles]  # Penstock's speedup; empty without common rounds or for Penstock
    tokens: Tokens | None
    memory_mib: float
    other_cores: float  # cores busy with other processes or stolen, maximum of all runs

    def as_json(self) -> dict[str, Any]:
        return {
            "values": {phase: asdict(quantiles) for phase, quantiles in self.values.items()},
            "share_of_limit": {
                phase: asdict(quantiles) for phase, quantiles in self.reached.items()
            },
            "ours_is_faster_by": {
                phase: asdict(quantiles) for phase, quantiles in self.ahead.items()
            },
            "tokens": asdict(self.tokens) if self.tokens else None,
            "memory_mib": self.memory_mib,
            "most_other_cores": self.other_cores,
        }


def summarize(rounds: Sequence[Sequence[EngineRun]], work: Work, cost: Cost) -> list[Row]:
    """Return one row per engine, in the order of ENGINES; `rounds` is [round][engine]."""
    runs = [run for each in rounds for run in each]
    names = [name for name in BY_NAME if any(run.engine == name for run in runs)]
    judge = _tokens(runs, REFERENCE)
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
                tokens=_compared(BY_NAME[name], runs, judge),
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
    ours = "penstock-int8" if other.quantization else "penstock"
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


def _compared(engine: Engine, runs: Sequence[EngineRun], judge: list[list[int]]) -> Tokens | None:
    answers = _tokens(runs, engine.name)
    if engine.quantization or engine.name == REFERENCE or not (judge and answers):
        return None
    return Tokens.of(answers, judge)
