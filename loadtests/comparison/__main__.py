"""Our engine and our cluster beside every engine that runs here, in one run and one report.

`python -m penstock.loadtests.comparison` installs what it compares with (into environments of their
own, once), makes the model, gives every engine the same work in turns, and writes JSON and a page.
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

from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.report import commit, machine
from penstock.loadtests.comparison import output
from penstock.loadtests.comparison.checkpoints import Cost, NoCheckpoint, checkpoint
from penstock.loadtests.comparison.engines import BY_NAME, ENGINES, Engine
from penstock.loadtests.comparison.environments import NotInstalled, cache_folder
from penstock.loadtests.comparison.process import EngineFailed
from penstock.loadtests.comparison.record import BadRecord, Record, merged, read
from penstock.loadtests.comparison.rounds import Rounds
from penstock.loadtests.comparison.work import Work
from penstock.workers.config import WorkerConfig

PROGRAM = "python -m penstock.loadtests.comparison"
_NOT_THERE = "this engine has no such quantization yet"
_KNOWN = ", ".join(BY_NAME)


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """How it is measured."""

    model: Literal["150m", "1b", "moe", "shipped", "tiny"] = option("150m", "what is served")
    engines: tuple[str, ...] = option((), f"only these, of {_KNOWN}")
    without: tuple[str, ...] = option((), "leave these out; the report says so")
    rounds: int = option(5, "turns of each engine")
    threads: int = option(0, "of every engine; by default the cores that this process may use")
    one_at_a_time: bool = option(False, "start each engine anew for its turn: for large models")
    merge: tuple[str, ...] = option((), "measure nothing: make one report of these JSON files")
    save: str = option("", "write NAME.json and NAME.html; by default under loadtests/results")

    def __post_init__(self) -> None:
        for name in (*self.engines, *self.without):
            if name not in BY_NAME:
                raise ValueError(f"there is no engine {name}; there are {_KNOWN}")
        if self.rounds < 1 or self.threads < 0:
            raise ValueError("--rounds and --threads must be at least 1")
        if not self.chosen():
            raise ValueError("no engine is left to measure")

    def chosen(self) -> list[Engine]:
        """The engines to measure, those that cannot be here aside."""
        left_out = self.left_out()
        return [engine for engine in ENGINES if engine.name not in left_out]

    def left_out(self) -> dict[str, str]:
        """Engines by name, and why they are not measured."""
        reasons = {}
        for engine in ENGINES:
            if engine.name in self.without or (self.engines and engine.name not in self.engines):
                reasons[engine.name] = "left out by a flag"
            elif engine.quantization and engine.is_ours and not _quantizes():
                reasons[engine.name] = _NOT_THERE
        return reasons

    @property
    def num_threads(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))

    @property
    def stem(self) -> Path:
        day = datetime.now(UTC).date().isoformat()
        return Path(self.save or f"loadtests/results/peers-{self.model}-{day}")


def _quantizes() -> bool:
    return "quantization" in {each.name for each in dataclasses.fields(WorkerConfig)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save; return 0, 1 (an engine or a file failed), 2 (flags) or 130."""
    about = "Our engine and our cluster beside every engine that runs here."
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
        print("interrupted before the first whole round: nothing is written", file=sys.stderr)
        return 130
    return 130 if interrupted else 0


def _begun(run: Run, work: Work) -> Record:
    """A record without a round yet. Installs nothing, but makes the model."""
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
    """Add the rounds; False where it was interrupted after whole ones."""
    cache, engines = cache_folder(), run.chosen()
    model = checkpoint(run.model, cache)
    try:
        with (
            Rounds(
                engines, model, run.num_threads, record.work, cache, run.one_at_a_time
            ) as rounds,
            _progress(run.rounds * len(engines)) as (report, done),
        ):
            record.about = rounds.about
            for runs in rounds.run(run.rounds, report, done):
                record.rounds.append(runs)
    except KeyboardInterrupt:
        if not record.rounds:
            raise
        print(f"interrupted: {len(record.rounds)} whole rounds count", file=sys.stderr)
        return False
    return True


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """Show whose turn it is: a bar on a terminal, lines elsewhere."""
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
