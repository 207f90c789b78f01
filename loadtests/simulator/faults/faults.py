"""`penstock simulate faults`: runs seeded fault schedules, and checks invariants and answers."""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from penstock.common.number_text import number_text
from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.simulator.faults.parallel_run import (
    BATCH_SIZE,
    BadRecord,
    RunRecord,
    counts_of,
    play_batches,
    remaining_batches,
)
from penstock.loadtests.simulator.faults.schedule_run import (
    InvariantViolated,
    RunCounts,
    ScheduleRun,
)
from penstock.loadtests.simulator.faults.schedules import Schedule, schedule_of
from penstock.loadtests.simulator.faults.shrink import command_of, failure_of, shrunk

MAX_SEED = 2**63 - 1
_SHOWN_FAILURES = 5
PROGRESS_SECONDS = 10.0


class WrongOptions(ValueError):
    """Raised for contradictory or out-of-range options. The message names the option."""


@dataclass(frozen=True, slots=True)
class Play:
    """The schedules to run."""

    seed: int | None = option(None, "run only this schedule and print its events")
    requests: str | None = option(None, "with --seed: run only these requests, as 0,3,7 (or none)")
    faults: str | None = option(None, "with --seed: run only these faults, as 1,2 (or none)")
    schedules: int = option(2000, "number of schedules")
    first: int = option(0, "seed of the first schedule")
    processes: int = option(2, "number of processes that run the schedules")
    log: Path | None = option(None, "with --seed: write the events to this file")  # noqa: RUF009
    record: Path | None = option(None, "record to this file, and resume from it")  # noqa: RUF009
    as_json: bool = option(False, "print counts and failures as one line of JSON")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns:
        0 if all invariants held, 1 if a schedule failed, 2 for wrong options, 130 after Ctrl-C.
    """
    about = "Run seeded fault schedules in virtual time; check every answer and every KV block."
    (play,) = read_flags("penstock simulate faults", about, (Play,), arguments)
    try:
        _check(play)
        if play.seed is not None:
            return _play_one(_chosen(play), play.log)
        return _play_many(play)
    except (WrongOptions, BadRecord, OSError) as error:
        print(f"penstock simulate faults: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _check(play: Play) -> None:
    if play.seed is not None and play.record is not None:
        raise WrongOptions("--record cannot be used with --seed: it records runs of many schedules")
    if play.seed is None and (play.requests or play.faults or play.log):
        raise WrongOptions("--requests, --faults and --log need --seed")
    for name in ("seed", "first"):
        if not 0 <= (value := getattr(play, name) or 0) <= MAX_SEED:
            raise WrongOptions(f"--{name} must be from 0 to 2^63 - 1, not {number_text(value)}")
    for name in ("schedules", "processes"):
        if (value := getattr(play, name)) < 1:
            raise WrongOptions(f"--{name} must be 1 or more, not {number_text(value)}")


def _chosen(play: Play) -> Schedule:
    schedule = schedule_of(play.seed or 0)
    there = {
        "requests": [one.number for one in schedule.requests],
        "faults": [one.number for one in schedule.faults],
    }
    requests, faults = (_numbers(getattr(play, name), name, there[name]) for name in there)
    return schedule.only(requests, faults)


def _numbers(text: str | None, name: str, there: Sequence[int]) -> list[int] | None:
    """Parse numbers such as `0,3,7`; `none` gives []. Return None without the option."""
    if text is None:
        return None
    try:
        numbers = [] if text == "none" else [int(piece) for piece in text.split(",")]
    except ValueError:
        raise WrongOptions(f"--{name} {text!r}: expected 'none', or numbers as in 0,3,7") from None
    strange = [number for number in numbers if number not in there]
    if strange and not there:
        raise WrongOptions(f"--{name}: the schedule has no {name}: expected 'none'")
    if strange:
        raise WrongOptions(
            f"--{name}: expected numbers from 0 to {len(there) - 1}, not {strange[0]}"
        )
    return numbers


# ------------------------------------------------------------------ one schedule


def write_events(schedule: Schedule, out: TextIO) -> str:
    """Run a schedule and write its events to `out`. Return the failure, or "" without one."""
    try:
        ScheduleRun(schedule, lambda line: print(line, file=out)).play()
    except InvariantViolated as broken:
        return str(broken)
    return ""


def _play_one(schedule: Schedule, log: Path | None) -> int:
    if log is None:
        problem = write_events(schedule, sys.stdout)
    else:
        with log.open("w", encoding="utf-8") as out:
            problem = write_events(schedule, out)
    print(f"failed: {problem}" if problem else "all invariants held", file=sys.stderr)
    return 1 if problem else 0


# ------------------------------------------------------------------ many schedules


def play_seeds(seeds: range) -> tuple[RunCounts, list[int]]:
    """Run the schedules of these seeds. Return the sums of their counts, and the failed seeds."""
    counts, failed = RunCounts(), []
    for seed in seeds:
        world = ScheduleRun(schedule_of(seed))
        try:
            counts.add(world.play())
        except InvariantViolated:
            failed.append(seed)
    return counts, failed


def _play_many(options: Play) -> int:
    seeds = range(options.first, options.first + options.schedules)
    record = None if options.record is None else RunRecord(options.record)
    batches = record.read(seeds) if record is not None else []
    output = sys.stderr if options.as_json else sys.stdout
    progress = Progress(len(seeds), sum(batch.count for batch in batches), output)
    for batch in batches:
        progress.failures(batch.failed)
    left = remaining_batches(seeds, batches, min(BATCH_SIZE, -(-len(seeds) // options.processes)))
    for batch in play_batches(left, play_seeds, options.processes):
        batches.append(batch)
        if record is not None:
            record.add(batch)
        progress.failures(batch.failed)
        progress.played(batch.count)
    counts = RunCounts()
    for batch in sorted(batches, key=lambda one: one.first):
        counts.add(batch.counts)
    failed = sorted(seed for batch in batches for seed in batch.failed)
    if options.as_json:
        print(json.dumps({"counts": counts_of(counts), "failed": failed}))
    else:
        print(_summary(len(seeds), counts, progress.seconds))
    return 1 if failed else 0


class Progress:
    """Prints the progress to stderr, and a line for each failed schedule to `out`."""

    def __init__(self, count: int, num_before: int, out: TextIO) -> None:
        self._out = out
        self._count = count
        self._num_before = self._num_played = num_before
        self._num_failed = 0
        self._started = self._printed_at = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    def played(self, count: int) -> None:
        self._num_played += count
        if time.monotonic() - self._printed_at < PROGRESS_SECONDS:
            return
        self._printed_at = time.monotonic()
        rate = (self._num_played - self._num_before) / self.seconds
        left = (self._count - self._num_played) / rate
        print(
            f"{self._num_played} of {self._count} schedules, {rate:.1f} a second, "
            f"{self._num_failed} failed, {left / 60:.0f} min left",
            file=sys.stderr,
            flush=True,
        )

    def failures(self, seeds: Sequence[int]) -> None:
        """Print a line for each failed seed.

        The first few schedules are shrunk, which can be slow.
        """
        for seed in seeds:
            schedule = schedule_of(seed)
            if self._num_failed < _SHOWN_FAILURES:
                schedule = shrunk(schedule)
            self._num_failed += 1
            why = failure_of(schedule) or "does not fail when run again"
            text = f"seed {seed} failed: {why}  {command_of(schedule)}"
            print(text, file=self._out, flush=True)


def _summary(num_schedules: int, counts: RunCounts, seconds: float) -> str:
    ends = ", ".join(f"{number} {how}" for how, number in counts.ends.most_common())
    kinds = ", ".join(f"{number} {kind}" for kind, number in counts.faults.most_common())
    return "\n".join(
        [
            f"{num_schedules} schedules in {seconds:.0f} s: {counts.requests} requests ({ends}), "
            f"{counts.tokens} tokens, {counts.constrained} complete constrained answers, "
            f"{counts.kv_transfers} KV transfers, "
            f"{counts.failovers} failovers",
            f"{counts.faults.total()} faults: {kinds or 'none'}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
