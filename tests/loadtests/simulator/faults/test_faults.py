"""Fault schedules: all hold; what is broken on purpose is found, made small and played again."""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.loadtests.simulator.faults import faults
from penstock.loadtests.simulator.faults.schedules import schedule_of
from penstock.loadtests.simulator.faults.shrink import command_of, failure_of, shrunk
from penstock.loadtests.simulator.world import network, transfer_endpoints
from penstock.loadtests.simulator.world.session import Session
from penstock.loadtests.simulator.world.worker import Worker
from penstock.router.routing import token_log
from penstock.router.routing.events import Command, Deliver, NewToken
from penstock.workers.kv_transfer import shards
from penstock.workers.scheduling import leases
from penstock.workers.scheduling.kv_pool import State
from penstock.workers.scheduling.sequence import Ints, Key

Break = Callable[[pytest.MonkeyPatch], None]

NUM_QUICK = 60


@pytest.mark.slow
def test_some_schedules_hold() -> None:
    tally, failed = faults.play_seeds(range(NUM_QUICK))
    assert not failed
    assert tally.kv_transfers > NUM_QUICK
    assert tally.failovers > 0
    assert tally.ends["ok"] > 0.7 * tally.requests


# CI plays 2,000 of them: .ci/run.
@pytest.mark.slow
def test_two_processes_share_the_schedules(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for processes in (1, 2):
        given = ["--schedules=4", "--first=5", f"--processes={processes}"]
        assert main(["simulate", "faults", *given]) == 0
        told.append(re.sub("in [0-9]+ s", "", capsys.readouterr().out))
    assert told[0] == told[1]


# ------------------------------------------------------------------ the same again


def told(seed: int) -> str:
    out = StringIO()
    assert faults.write_events(schedule_of(seed), out) == ""
    return out.getvalue()


def test_the_same_seed_gives_the_same_story(tmp_path: Path) -> None:
    for seed in range(3):
        assert told(seed) == told(seed)
    assert told(0) != told(1)


def test_the_story_is_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.cli", "simulate", "faults", "--seed", "7"]
    for salt in "12":
        path = tmp_path / salt
        environment = {"PYTHONHASHSEED": salt, "PYTHONPATH": ":".join(sys.path)}
        subprocess.run([*command, "--log", str(path)], check=True, env=environment)
        assert path.read_text() == told(7)


def test_leaving_some_out_changes_no_other() -> None:
    whole = schedule_of(11)
    part = whole.only(requests=[1, 3], faults=[])
    assert part.requests == (whole.requests[1], whole.requests[3])
    assert part.faults == ()
    assert part.workers == whole.workers


# ------------------------------------------------------------------ broken on purpose


def deliver_duplicates(patch: pytest.MonkeyPatch) -> None:
    """Streams take messages twice, and the log takes any position."""

    def take(
        self: token_log.TokenLog, token: NewToken, out: list[Command]
    ) -> token_log.AppendResult:
        self.answers[0].append(token.token)
        tokens = (token.token,)
        out.append(
            Deliver(token.request, 0, token.position, tokens, (token.logprobs,), token.finish)
        )
        self.finished[0] = bool(token.finish)
        return (
            token_log.AppendResult.STATE_CHANGED
            if token.finish
            else token_log.AppendResult.APPENDED
        )

    patch.setattr(network.Pipe, "is_next", lambda pipe, number: True)
    patch.setattr(token_log.TokenLog, "append", take)


def ignore_epochs(patch: pytest.MonkeyPatch) -> None:
    """Bytes of a transfer that is over are written into what were its blocks."""
    ever: dict[tuple[int, int], transfer_endpoints.Transfer] = {}
    open_ = transfer_endpoints.Receiver.open

    def opened(
        self: transfer_endpoints.Receiver,
        expected: transfer_endpoints.ExpectedTransfer,
        done: Callable[[str], None],
    ) -> int:
        epoch = open_(self, expected, done)
        ever[id(self), epoch] = self.transfers[epoch]
        return epoch

    def find(
        self: transfer_endpoints.Receiver, epoch: int, source: transfer_endpoints.WorkerId
    ) -> transfer_endpoints.Transfer | None:
        return ever.get((id(self), epoch))

    patch.setattr(transfer_endpoints.Receiver, "open", opened)
    patch.setattr(transfer_endpoints.Receiver, "find", find)


def ignore_checksums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transfer_endpoints, "hash_of", lambda content: 0)


def read_before_all_is_in(patch: pytest.MonkeyPatch) -> None:
    def complete(self: shards.Coverage) -> bool:
        return self._missing < (self.stop - self.start) * self.rectangle.area

    patch.setattr(shards.Coverage, "complete", property(complete))


def reuse_what_is_written(patch: pytest.MonkeyPatch) -> None:
    """A dropped receiver's blocks are free at once, though a transfer still writes them."""

    def abandon(self: leases.Leases, key: Key, blocks: Ints) -> None:
        self._pool.release(blocks, State.RESERVED)

    patch.setattr(leases.Leases, "abandon", abandon)


def reuse_what_is_read(patch: pytest.MonkeyPatch) -> None:
    """A lease goes with its drop, though it is being sent."""

    def drop(self: leases.Leases, key: Key) -> None:
        if key in self._leases:
            self._release(key)

    patch.setattr(leases.Leases, "drop", drop)
    patch.setattr(leases.Leases, "unpin", lambda self, key: None)


def keep_what_was_a_streams(patch: pytest.MonkeyPatch) -> None:
    """The end of a stream frees nothing."""

    def close(self: Worker, session: Session) -> None:
        self.sessions.pop(session.number, None)

    patch.setattr(Worker, "close", close)


MISTAKES: Sequence[Break] = (
    deliver_duplicates,
    ignore_epochs,
    ignore_checksums,
    read_before_all_is_in,
    reuse_what_is_written,
    reuse_what_is_read,
    keep_what_was_a_streams,
)


def first_failing(seeds: range) -> int | None:
    return next((seed for seed in seeds if failure_of(schedule_of(seed))), None)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_planted_mistake_is_found(mistake: Break, monkeypatch: pytest.MonkeyPatch) -> None:
    mistake(monkeypatch)
    assert first_failing(range(200)) is not None


def test_a_failing_seed_becomes_one_small_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ignore_checksums(monkeypatch)
    seed = first_failing(range(200))
    assert seed is not None
    assert main(["simulate", "faults", "--processes=1", "--schedules=1", f"--first={seed}"]) == 1
    said = capsys.readouterr().out
    small = shrunk(schedule_of(seed))
    assert f"  {command_of(small)}\n" in said
    assert len(small.requests) <= 2
    assert [fault.kind for fault in small.faults] == ["corrupt blocks"]
    assert main(command_of(small).split()[1:]) == 1
    assert "failed: " in capsys.readouterr().err
    monkeypatch.undo()
    assert main(command_of(small).split()[1:]) == 0


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["--seed", "-1"], "--seed must be from 0 to 2^63 - 1"),
        (["--faults", "1"], "--requests, --faults and --log go with --seed"),
        (["--seed", "1", "--faults", "x"], "--faults 'x': say numbers, as 0,3,7, or none"),
        (["--seed", "1", "--requests", "99"], "not 99"),
        (["--schedules", "0"], "--schedules must be 1 or more"),
        (["--processes", "0"], "--processes must be 1 or more"),
        (["--seed", "1", "--log", "/nowhere/log"], "No such file or directory"),
        (["--sead", "1"], "unrecognized arguments"),
    ],
)
def test_options_that_make_no_sense(
    given: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["simulate", "faults", *given])
    except SystemExit as end:
        code = int(end.code or 0)
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1


def test_an_unknown_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "weather"]) == 2
    assert capsys.readouterr().err.startswith("penstock simulate: there is no 'weather'; known are")
    with pytest.raises(SystemExit):
        main(["simulate"])
    assert "faults" in capsys.readouterr().out
