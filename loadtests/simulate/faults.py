"""`penstock simulate faults`: plays seeded fault schedules and checks what must always be true."""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from penstock.loadtests.flags import option, read_flags
from penstock.loadtests.simulate.schedules import Schedule, schedule_of
from penstock.loadtests.simulate.shrink import command_of, failure_of, shrunk
from penstock.loadtests.simulate.world import Broken, Tally, World

MAX_SEED = 2**63 - 1
_SHOWN_FAILURES = 5


class WrongOptions(ValueError):
    """Options that make no sense; the message says which."""


@dataclass(frozen=True, slots=True)
class Play:
    """What is played."""

    seed: int | None = option(None, "play this schedule alone, and tell its story")
    requests: str | None = option(None, "with --seed: only these, as 0,3,7 (or none)")
    faults: str | None = option(None, "with --seed: only these, as 1,2 (or none)")
    schedules: int = option(2000, "how many")
    first: int = option(0, "the seed of the first")
    processes: int = option(2, "that share the schedules")
    log: Path | None = option(None, "with --seed: write the story there instead")  # noqa: RUF009
    as_json: bool = option(False, "print counts and failures as one line of JSON")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0: all held, 1: a schedule failed, 2: wrong options, 130: Ctrl-C."""
    about = "Play seeded fault schedules in virtual time and check every answer and every block."
    (play,) = read_flags("penstock simulate faults", about, (Play,), arguments)
    try:
        _check(play)
        if play.seed is not None:
            return _play_one(_chosen(play), play.log)
        return _play_many(play)
    except (WrongOptions, OSError) as error:
        print(f"penstock simulate faults: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _check(play: Play) -> None:
    if play.seed is None and (play.requests or play.faults or play.log):
        raise WrongOptions("--requests, --faults and --log go with --seed")
    for name in ("seed", "first"):
        if not 0 <= (getattr(play, name) or 0) <= MAX_SEED:
            raise WrongOptions(f"--{name} must be from 0 to 2^63 - 1")
    for name in ("schedules", "processes"):
        if getattr(play, name) < 1:
            raise WrongOptions(f"--{name} must be 1 or more")


def _chosen(play: Play) -> Schedule:
    schedule = schedule_of(play.seed or 0)
    there = {
        "requests": [one.number for one in schedule.requests],
        "faults": [one.number for one in schedule.faults],
    }
    requests, faults = (_numbers(getattr(play, name), name, there[name]) for name in there)
    return schedule.only(requests, faults)


def _numbers(text: str | None, name: str, there: Sequence[int]) -> list[int] | None:
    """Read `0,3,7` or `none`."""
    if text is None:
        return None
    try:
        numbers = [] if text == "none" else [int(part) for part in text.split(",")]
    except ValueError:
        raise WrongOptions(f"--{name} {text!r}: say numbers, as 0,3,7, or none") from None
    strange = [number for number in numbers if number not in there]
    if strange:
        raise WrongOptions(f"--{name}: this schedule has 0 to {len(there) - 1}, not {strange[0]}")
    return numbers


# ------------------------------------------------------------------ one


def story(schedule: Schedule, out: TextIO) -> str:
    """Play it and write what happens; why it fails, or ""."""
    try:
        World(schedule, lambda line: print(line, file=out)).play()
    except Broken as broken:
        return str(broken)
    return ""


def _play_one(schedule: Schedule, log: Path | None) -> int:
    if log is None:
        problem = story(schedule, sys.stdout)
    else:
        with log.open("w", encoding="utf-8") as out:
            problem = story(schedule, out)
    print(f"failed: {problem}" if problem else "everything held", file=sys.stderr)
    return 1 if problem else 0


# ------------------------------------------------------------------ many


def play_seeds(seeds: range) -> tuple[Tally, list[int]]:
    """Play these; what happened, and the seeds that failed."""
    tally, failed = Tally(), []
    for seed in seeds:
        world = World(schedule_of(seed))
        try:
            tally.add(world.play())
        except Broken:
            failed.append(seed)
    return tally, failed


def _play_many(options: Play) -> int:
    seeds = range(options.first, options.first + options.schedules)
    started = time.monotonic()
    if options.processes == 1:
        tally, failed = play_seeds(seeds)
    else:
        tally, failed = _gather(list(_parts(seeds, options.processes)))
    if options.as_json:
        print(json.dumps({"tally": asdict(tally), "failed": failed}))
    else:
        print(_summary(len(seeds), tally, time.monotonic() - started))
        for seed in failed[:_SHOWN_FAILURES]:
            small = shrunk(schedule_of(seed))
            print(f"seed {seed} failed: {failure_of(small)}\n  {command_of(small)}")
        if len(failed) > _SHOWN_FAILURES:
            print(f"and {len(failed) - _SHOWN_FAILURES} more: {failed[_SHOWN_FAILURES:]}")
    return 1 if failed else 0


def _parts(seeds: range, count: int) -> Iterator[range]:
    size = -(-len(seeds) // count)
    for start in range(0, len(seeds), size):
        yield seeds[start : start + size]


def _gather(parts: Sequence[range]) -> tuple[Tally, list[int]]:
    """Each part in a process of its own."""
    command = (sys.executable, "-m", "penstock.cli", "simulate", "faults", "--as-json")
    running = [
        subprocess.Popen(
            [*command, "--processes=1", f"--first={part.start}", f"--schedules={len(part)}"],
            stdout=subprocess.PIPE,
            text=True,
        )
        for part in parts
    ]
    tally, failed = Tally(), []
    try:
        for process in running:
            said, _ = process.communicate()
            if process.returncode not in (0, 1):
                raise WrongOptions(f"a process ended with {process.returncode}")
            told = json.loads(said)
            counts = told["tally"]
            counts["ends"], counts["faults"] = Counter(counts["ends"]), Counter(counts["faults"])
            tally.add(Tally(**counts))
            failed += told["failed"]
    finally:
        for process in running:
            process.kill()
            process.wait()
    return tally, failed


def _summary(count: int, tally: Tally, seconds: float) -> str:
    ends = ", ".join(f"{number} {how}" for how, number in tally.ends.most_common())
    kinds = ", ".join(f"{number} {kind}" for kind, number in tally.faults.most_common())
    return "\n".join(
        [
            f"{count} schedules in {seconds:.0f} s: {tally.requests} requests ({ends}), "
            f"{tally.tokens} tokens, {tally.handovers} hand-overs, {tally.failovers} failovers",
            f"{tally.faults.total()} faults: {kinds or 'none'}",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
