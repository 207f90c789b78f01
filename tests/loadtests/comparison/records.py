"""Short records with invented figures, for tests."""

from penstock.loadtests.comparison.checkpoints import Cost
from penstock.loadtests.comparison.record import Record
from penstock.loadtests.comparison.work import EngineRun, Work

WORK = Work(requests=2, input_len=8, output_len=4, stream_len=2, long_len=16)
LIMITS = {"gflops": 100.0, "int8_gops": 400.0, "memory_gbs": 10.0}


def engine_run(engine: str, number: int = 0, seconds: float = 1.0, answer: int = 7) -> EngineRun:
    """Return a run in which each phase took `seconds`, and each streamed token a tenth of it."""
    return EngineRun(
        engine,
        number,
        dict(LIMITS),
        batch=seconds,
        first=[seconds],
        stream=[seconds + 2 * seconds / 10],
        long=[seconds],
        memory_mib=100.0,
        tokens=[[answer] * 4] * 2 if number == 0 else [],
    )


def record(*rounds: list[EngineRun]) -> Record:
    return Record(
        model="tiny",
        threads=2,
        work=WORK,
        cost=Cost(body=1000, head=500, attention=64),
        machine={"cpu": "a <fast> one", "cpus": 2, "memory_gib": 1.0},
        dates=["2026-11-21"],
        commits=["abc"],
        left_out={"vllm": "left out by a flag"},
        about={each.engine: {"version": "1", "prefix_cache": False} for each in rounds[0]},
        rounds=list(rounds),
    )
