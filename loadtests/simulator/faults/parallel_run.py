"""Runs batches of schedules in several processes.

The results are recorded, so that a later run can resume.
"""

import json
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from penstock.loadtests.simulator.faults.schedule_run import RunCounts

BATCH_SIZE = 50
"""Number of schedules in a batch; a process returns its results after each batch."""


class BadRecord(ValueError):
    """Raised if the record file cannot be parsed. The message names the file and the line."""


@dataclass(frozen=True, slots=True)
class SeedBatch:
    """The result of running one batch of consecutive seeds."""

    first: int
    count: int
    counts: RunCounts
    failed: Sequence[int]  # seeds whose schedules failed

    @property
    def seeds(self) -> range:
        return range(self.first, self.first + self.count)


Play = Callable[[range], tuple[RunCounts, list[int]]]


def play_batches(seeds: Sequence[range], play: Play, processes: int) -> Iterator[SeedBatch]:
    """Run the batches and yield the result of each batch as soon as it is complete.

    If `processes` is 1, the batches run in this process. Raises OSError if a process dies.
    """
    if processes == 1:
        for seed_range in seeds:
            yield SeedBatch(seed_range.start, len(seed_range), *play(seed_range))
        return
    deaf = (signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends the other processes
    executor = ProcessPoolExecutor(processes, get_context("spawn"), signal.signal, deaf)
    try:
        waiting = {executor.submit(play, seed_range): seed_range for seed_range in seeds}
        for future in as_completed(waiting):
            seed_range = waiting.pop(future)
            yield SeedBatch(seed_range.start, len(seed_range), *future.result())
    except BrokenProcessPool:
        raise OSError(
            "a simulation process died: repeat the command; with --record, it resumes the run"
        ) from None
    finally:
        executor.shutdown(cancel_futures=True)


def remaining_batches(
    seeds: range, done: Sequence[SeedBatch], size: int = BATCH_SIZE
) -> list[range]:
    """Return the seeds that `done` does not cover, as ranges of at most `size` seeds."""
    gaps, start = [], seeds.start
    for batch in sorted(done, key=lambda one: one.first):
        gaps.append(range(start, min(batch.first, seeds.stop)))
        start = max(start, batch.seeds.stop)
    gaps.append(range(start, seeds.stop))
    return [gap[first : first + size] for gap in gaps for first in range(0, len(gap), size)]


class RunRecord:
    """A record file with one line of JSON per finished batch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, seeds: range) -> list[SeedBatch]:
        """Return the recorded batches within `seeds`. The last line is removed if it is incomplete.

        Raises BadRecord and OSError.
        """
        if not self._path.exists():
            return []
        try:
            *lines, cut = self._path.read_text(encoding="utf-8").split("\n")
        except UnicodeDecodeError:
            raise BadRecord(f"{self._path}: expected a text file in UTF-8") from None
        batches: list[SeedBatch] = []
        for number, line in enumerate(lines, start=1):
            try:
                batch = _batch_of(json.loads(line))
            except (ValueError, TypeError, KeyError):
                raise BadRecord(
                    f"{self._path}:{number}: expected a line that --record wrote; give another file"
                ) from None
            if batch.first >= seeds.start and batch.seeds.stop <= seeds.stop:
                batches.append(batch)
        if cut:
            self._path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return batches

    def add(self, batch: SeedBatch) -> None:
        """Append a batch to the file immediately. Raises OSError."""
        entry = {"first": batch.first, "count": batch.count, "failed": list(batch.failed)}
        line = json.dumps({**entry, "counts": counts_of(batch.counts)})
        with self._path.open("a", encoding="utf-8") as out:
            out.write(f"{line}\n")


def counts_of(counts: RunCounts) -> dict[str, Any]:
    """Return the counts as values that can be written as JSON."""
    return {each.name: getattr(counts, each.name) for each in fields(RunCounts)}


def _batch_of(entry: Any) -> SeedBatch:
    counts = dict(entry["counts"])
    names = {each.name for each in fields(RunCounts)}
    if counts.keys() != names or not all(type(entry[name]) is int for name in ("first", "count")):
        raise ValueError
    for name in ("ends", "faults"):
        counts[name] = Counter(counts[name])
    return SeedBatch(entry["first"], entry["count"], RunCounts(**counts), list(entry["failed"]))
