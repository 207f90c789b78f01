"""Compares Penstock's engine and cluster with other engines on this machine.

`python -m penstock.loadtests.comparison` installs the other engines once, each in its own virtual
environment. The command then creates the model, runs the same work on each engine in turn, and
writes a report as JSON and HTML.
"""

import dataclasses
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from penstock.loadtests.bench.flags import check_least, option, read_flags
from penstock.loadtests.bench.report import commit, machine
from penstock.loadtests.comparison import output
from penstock.loadtests.comparison.checkpoints import Cost, NoCheckpoint, checkpoint
from penstock.loadtests.comparison.engines import BY_NAME, ENGINES, Engine
from penstock.loadtests.comparison.environments import NotInstalled, cache_folder
from penstock.loadtests.comparison.process import EngineFailed
from penstock.loadtests.comparison.record import BadRecord, Record, merged, read
from penstock.loadtests.comparison.rounds import Rounds
from penstock.loadtests.comparison.work import Work
from penstock.workers.config import KV_CACHE_DTYPES

PROGRAM = "python -m penstock.loadtests.comparison"
_KNOWN = ", ".join(BY_NAME)


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Settings of the measurement."""

    model: Literal["150m", "1b", "moe", "shipped", "tiny"] = option("150m", "model to serve")
    engines: tuple[str, ...] = option((), f"engines to measure, of {_KNOWN}; default: all")
    without: tuple[str, ...] = option((), "engines to leave out; the report lists them")
    rounds: int = option(5, "number of rounds; each engine runs once per round")
    threads: int = option(0, "threads of each engine; default: the cores usable by this process")
    one_at_a_time: bool = option(False, "restart each engine for every round (large models)")
    kv_cache_dtype: str = option("auto", "format of the KV cache of Penstock's engines")
    merge: tuple[str, ...] = option((), "do not measure; merge these JSON files into one report")
    save: str = option("", "write NAME.json and NAME.html; default: in loadtests/results")

    def __post_init__(self) -> None:
        for name in (*self.engines, *self.without):
            if name not in BY_NAME:
                raise ValueError(f"unknown engine {name!r}: expected one of {_KNOWN}")
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            known = ", ".join(KV_CACHE_DTYPES)
            raise ValueError(f"--kv-cache-dtype is {self.kv_cache_dtype!r}: expected {known}")
        check_least(self, 1, ("rounds",))
        check_least(self, 0, ("threads",))
        if not self.chosen():
            raise ValueError("no engine is left to measure: check --engines and --without")

    def chosen(self) -> list[Engine]:
        """Return the engines to measure."""
        left_out = self.left_out()
        return [engine for engine in ENGINES if engine.name not in left_out]

    def left_out(self) -> dict[str, str]:
        """Return the engines that are not measured, with the reason for each."""
        reasons = {}
        for engine in ENGINES:
            if engine.name in self.without or (self.engines and engine.name not in self.engines):
                reasons[engine.name] = "left out by a flag"
        return reasons

    @property
    def num_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))

    @property
    def stem(self) -> Path:
        day = datetime.now(UTC).date().isoformat()
        return Path(self.save or f"loadtests/results/peers-{self.model}-{day}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save, and return the exit code.

    The code is 0 for success, 1 if an engine or a file failed, 2 for wrong flags, 130 after Ctrl-C.
    """
    about = "Measure Penstock's engine and cluster against other engines on this machine."
    try:
        run, work = read_flags(PROGRAM, about, (Run, Work), arguments)
    except ValueError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 2
    try:
        interrupted = False
        if run.merge:
            record = merged([read(Path(name)) for name in run.merge])
        else:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            record = _begun(run, work)
            interrupted = not _measure(run, record)
        output.show(record)
        output.save(record, run.stem)
    except (EngineFailed, NotInstalled, NoCheckpoint, BadRecord, OSError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted before the first complete round: no report written", file=sys.stderr)
        return 130
    return 130 if interrupted else 0


def _begun(run: Run, work: Work) -> Record:
    """Return a record without rounds. The model's checkpoint is created if it does not exist."""
    return Record(
        model=run.model,
        threads=run.num_threads,
        work=work,
        cost=Cost.of(checkpoint(run.model, cache_folder())),
        machine=machine(),
        dates=[datetime.now(UTC).isoformat(timespec="seconds")],
        commits=[commit()],
        left_out=run.left_out(),
    )


def _measure(run: Run, record: Record) -> bool:
    """Run the rounds and add their results to `record`.

    Returns False if the run was interrupted after at least one complete round.
    """
    cache, engines = cache_folder(), run.chosen()
    model = checkpoint(run.model, cache)
    try:
        with (
            Rounds(
                engines,
                model,
                run.num_threads,
                record.work,
                cache,
                run.one_at_a_time,
                run.kv_cache_dtype,
            ) as rounds,
            _progress(run.rounds * len(engines)) as (report, done),
        ):
            record.about = rounds.about
            for runs in rounds.run(run.rounds, report, done):
                record.rounds.append(runs)
    except KeyboardInterrupt:
        if not record.rounds:
            raise
        print(f"interrupted: report covers {len(record.rounds)} rounds", file=sys.stderr)
        return False
    return True


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Show the progress: as a bar if stderr is a terminal, otherwise one line per measurement."""
    console = Console(stderr=True)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.description}"), console=console, disable=not console.is_terminal
    ) as progress:
        task, began = progress.add_task("", total=total), time.monotonic()

        def report(what: str) -> None:
            progress.update(task, description=what)
            if not console.is_terminal:
                print(f"{time.monotonic() - began:5.0f} s  {what}", file=sys.stderr, flush=True)

        yield report, lambda _: progress.advance(task)


if __name__ == "__main__":
    sys.exit(main())
