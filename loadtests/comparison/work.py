"""Defines and measures the work that every engine does in each round."""

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from penstock.loadtests.bench.flags import option
from penstock.loadtests.comparison.process import EngineProcess

_LOWEST_TOKEN = 3  # lower token ids are padding, begin and end tokens
_REPEATS = 2  # number of repetitions of each measurement that has only one prompt
KEPT_ANSWERS = 16  # number of answers whose tokens are recorded for comparison
_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Work:
    """Numbers and lengths of the prompts and answers."""

    requests: int = option(64, "throughput: prompts in the batch")
    input_len: int = option(128, "throughput and TPOT: tokens of each prompt")
    output_len: int = option(64, "throughput: tokens of each answer")
    stream_len: int = option(32, "TPOT: tokens after the first, at batch size 1")
    long_len: int = option(1024, "TTFT: tokens of the prompt")
    seed: int = option(0, "seed of the prompts")

    def __post_init__(self) -> None:
        for each in ("requests", "input_len", "output_len", "stream_len", "long_len"):
            if getattr(self, each) < 1:
                raise ValueError(
                    f"--{each.replace('_', '-')} must be at least 1, not {getattr(self, each)}"
                )

    @property
    def max_model_len(self) -> int:
        answers = max(self.output_len, self.stream_len + 1)
        return max(self.input_len + answers, self.long_len + 1)

    def prompts(
        self, vocab_size: int, round_number: int, kind: int, count: int, length: int
    ) -> list[Any]:
        """Return random token ids, [count][length]. All engines get the same ids in a round."""
        rng = np.random.default_rng([self.seed, round_number, kind])
        drawn = rng.integers(_LOWEST_TOKEN, vocab_size, (count, length))
        return list(drawn.tolist())


@dataclass(slots=True)
class EngineRun:
    """Measurements of one engine in one round. Times are in seconds."""

    engine: str
    number: int  # number of the round, from 0
    limits: dict[str, float]  # limits of the machine just before the run (see `note_limits`)
    batch: float = 0.0  # duration of the throughput batch, in seconds
    # Seconds of each run with one prompt and one answer token.
    first: list[float] = field(default_factory=list)
    # Seconds of each run with one prompt and 1 + stream_len answer tokens.
    stream: list[float] = field(default_factory=list)
    # Seconds of each run with the long prompt and one token.
    long: list[float] = field(default_factory=list)
    own_cores: float = 0.0  # average number of cores that this engine used
    other_cores: float = 0.0  # average number of cores that other processes used
    stolen_cores: float = 0.0  # average number of cores that the hypervisor took (steal time)
    memory_mib: float = 0.0  # PSS (shared pages count once) of all processes of the engine, in MiB
    tokens: list[list[int]] = field(default_factory=list)  # first KEPT_ANSWERS answers of round 0

    def tpot(self, work: Work) -> float:
        """Return the seconds per token at batch size 1: the median over this run's repetitions."""
        gaps = [whole - first for whole, first in zip(self.stream, self.first, strict=True)]
        return float(np.median(gaps)) / work.stream_len

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def note_limits(limits: EngineProcess) -> dict[str, float]:
    """Measure the machine's limits: `gflops`, `int8_gops` and `memory_gbs` (read bandwidth)."""
    limits.resume()
    try:
        mega = limits.generate([], 0).tokens[0]
    finally:
        limits.pause()
    names = ("gflops", "int8_gops", "memory_gbs")
    return dict(zip(names, (value / 1000 for value in mega), strict=True))


def warm_up(engine: EngineProcess, work: Work, vocab_size: int) -> None:
    """Run each kind of work once with short answers, on prompts that no measurement uses."""
    batch = work.prompts(vocab_size, 0, 100, work.requests, work.input_len)
    engine.generate(batch, min(4, work.output_len))
    engine.generate(batch[:1], min(4, work.stream_len))
    engine.generate(work.prompts(vocab_size, 0, 101, 1, work.long_len), 1)


def run_engine(
    engine: EngineProcess, work: Work, vocab_size: int, number: int, limits: dict[str, float]
) -> EngineRun:
    """Run all work on one engine and measure it. Raises EngineFailed."""
    run = EngineRun(engine.engine.name, number, limits)
    before, began = _Cores.now(engine), time.perf_counter()
    prompts = work.prompts(vocab_size, number, 0, work.requests, work.input_len)
    answer = engine.generate(prompts, work.output_len)
    run.batch = answer.seconds
    if number == 0:
        run.tokens = answer.tokens[:KEPT_ANSWERS]
    singles = work.prompts(vocab_size, number, 1, 2 * _REPEATS, work.input_len)
    for first, stream in zip(singles[::2], singles[1::2], strict=True):
        run.first.append(engine.generate([first], 1).seconds)
        run.stream.append(engine.generate([stream], 1 + work.stream_len).seconds)
    for prompt in work.prompts(vocab_size, number, 2, _REPEATS, work.long_len):
        run.long.append(engine.generate([prompt], 1).seconds)
    _Cores.now(engine).less(before, time.perf_counter() - began, run)
    run.memory_mib = _memory(engine.tree())
    return run


@dataclass(frozen=True, slots=True)
class _Cores:
    """Total CPU seconds at one point in time, since the start of each process or of the machine."""

    own: float  # CPU seconds of the engine's processes
    client: float  # CPU seconds that this process used
    all: float  # CPU seconds that all processes of this machine used
    stolen: float  # CPU seconds that the hypervisor took (steal time)

    @classmethod
    def now(cls, engine: EngineProcess) -> "_Cores":
        times = psutil.cpu_times()
        busy = sum(getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq"))
        own = sum(_cpu(process) for process in engine.tree())
        return cls(own, _cpu(psutil.Process()), busy, getattr(times, "steal", 0.0))

    def less(self, before: "_Cores", seconds: float, run: EngineRun) -> None:
        own, everything = self.own - before.own, self.all - before.all
        others = everything - own - (self.client - before.client)
        run.own_cores = round(own / seconds, 3)
        run.other_cores = round(max(0.0, others / seconds), 3)
        run.stolen_cores = round((self.stolen - before.stolen) / seconds, 3)


def _cpu(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _memory(tree: Sequence[psutil.Process]) -> float:
    total = 0
    for process in tree:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return round(total / _MIB, 1)
