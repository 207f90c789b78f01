"""Fault schedules: all pass, and each injected bug is found, shrunk and reproduced."""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.common.grammar.matcher import CompiledGrammar, Words
from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.simulator.faults import faults
from penstock.loadtests.simulator.faults.schedules import schedule_of
from penstock.loadtests.simulator.faults.shrink import command_of, failure_of, shrunk
from penstock.loadtests.simulator.world import network, rank_pairs
from penstock.loadtests.simulator.world.session import Session
from penstock.loadtests.simulator.world.worker import Worker
from penstock.router.routing import request_state, token_log
from penstock.router.routing.prefix_cache import cache_feed
from penstock.router.routing.prefix_cache.cache_events import CacheEvents, ResyncCache
from penstock.router.routing.prefix_cache.cache_feed import CacheFeed
from penstock.router.routing.prefix_cache.prefix_index import PrefixIndex
from penstock.workers.kv_transfer import shards
from penstock.workers.kv_transfer.protocol.messages import Credit
from penstock.workers.kv_transfer.protocol.send import SendProtocol
from penstock.workers.kv_transfer.write_gate import WriteGate
from penstock.workers.sampling.mask_processors import GrammarMask, MaskProcessor, ReasoningEnd
from penstock.workers.sampling.token_masks import TokenMasks
from penstock.workers.scheduling import leases
from penstock.workers.scheduling.kv_pool import State
from penstock.workers.scheduling.published_blocks import BlockChanges
from penstock.workers.scheduling.sequence import Ints, Key
from tests.support.refusals import assert_refused

Inject = Callable[[pytest.MonkeyPatch], None]

NUM_QUICK = 60


@pytest.mark.slow
def test_some_schedules_pass() -> None:
    counts, failed = faults.play_seeds(range(NUM_QUICK))
    assert not failed
    assert counts.kv_transfers > NUM_QUICK
    assert counts.failovers > 0
    assert counts.constrained > NUM_QUICK
    assert counts.ends["ok"] > 0.7 * counts.requests


# Only a few schedules run here, because CI runs 2,000 (`.ci/run`).
@pytest.mark.slow
def test_one_and_two_processes_give_the_same_output(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = []
    for processes in (1, 2):
        options = ["--schedules=4", "--first=5", f"--processes={processes}"]
        assert main(["simulate", "faults", *options]) == 0
        outputs.append(re.sub("in [0-9]+ s", "", capsys.readouterr().out))
    assert outputs[0] == outputs[1]


# ------------------------------------------------------------------ reproducibility


def event_log(seed: int) -> str:
    out = StringIO()
    assert faults.write_events(schedule_of(seed), out) == ""
    return out.getvalue()


def test_the_same_seed_gives_the_same_events(tmp_path: Path) -> None:
    for seed in range(3):
        assert event_log(seed) == event_log(seed)
    assert event_log(0) != event_log(1)


def test_event_logs_are_identical_in_other_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "penstock.cli", "simulate", "faults", "--seed", "7"]
    for salt in "12":
        path = tmp_path / salt
        environment = {"PYTHONHASHSEED": salt, "PYTHONPATH": ":".join(sys.path)}
        subprocess.run([*command, "--log", str(path)], check=True, env=environment)
        assert path.read_text() == event_log(7)


def test_removing_requests_and_faults_leaves_the_rest_unchanged() -> None:
    whole = schedule_of(11)
    subset = whole.only(requests=[1, 3], faults=[])
    assert subset.requests == (whole.requests[1], whole.requests[3])
    assert subset.faults == ()
    assert subset.workers == whole.workers


def test_only_some_schedules_have_constraints() -> None:
    schedules = [schedule_of(seed) for seed in range(200)]
    share = [sum(one.constraint is not None for one in each.requests) for each in schedules]
    assert 30 < sum(map(bool, share)) < 90
    assert any(0 < count < len(each.requests) for count, each in zip(share, schedules, strict=True))


# ------------------------------------------------------------------ injected bugs


def deliver_duplicates(patch: pytest.MonkeyPatch) -> None:
    """Inject a bug: streams accept duplicate messages, and the token log accepts any position."""

    append = request_state.RequestState.append

    def take(
        self: request_state.RequestState,
        worker: str,
        attempt: int,
        choice: int,
        position: int,
        *rest: Any,
    ) -> token_log.AppendResult:
        length = len(self.token_log.answers[choice])
        return append(self, worker, attempt, choice, length, *rest)

    patch.setattr(network.Pipe, "is_next", lambda pipe, number: True)
    patch.setattr(request_state.RequestState, "append", take)


def ignore_epochs(patch: pytest.MonkeyPatch) -> None:
    """Inject a bug: late data of a closed transfer is written to blocks that have a new owner."""

    def enter(self: WriteGate) -> bool:
        self._num_inside += 1
        return True

    patch.setattr(WriteGate, "enter", enter)


def ignore_writers(patch: pytest.MonkeyPatch) -> None:
    """Inject a bug: a rank reports that it has drained an epoch while it is still writing."""

    def close(self: WriteGate, after: Callable[[], None]) -> None:
        self._closed = True
        after()

    patch.setattr(WriteGate, "close", close)


def unpin_at_the_credit(patch: pytest.MonkeyPatch) -> None:
    """Inject a bug: the source unpins blocks when their bytes are requested, not once sent."""

    def on_credit(self: SendProtocol, credit: Credit, now: float) -> None:
        on_credit_of_product(self, credit, now)
        message = self._sending.pop((credit.epoch, credit.index), None)
        if message is not None:
            self._settle(message, now)

    on_credit_of_product = SendProtocol._on_credit
    patch.setattr(SendProtocol, "_on_credit", on_credit)


def ignore_checksums(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(rank_pairs, "hash_of", lambda content: 0)


def complete_transfers_early(patch: pytest.MonkeyPatch) -> None:
    def complete(self: shards.Coverage) -> bool:
        return self._missing < (self.stop - self.start) * self.rectangle.area

    patch.setattr(shards.Coverage, "complete", property(complete))


def reuse_blocks_being_written(patch: pytest.MonkeyPatch) -> None:
    """Inject a bug: blocks of an aborted transfer are freed while data is still written to them."""

    def abandon(self: leases.Leases, key: Key, blocks: Ints) -> None:
        self._pool.release(blocks, State.RESERVED)

    patch.setattr(leases.Leases, "abandon", abandon)


def reuse_blocks_being_sent(patch: pytest.MonkeyPatch) -> None:
    """Inject a bug: a dropped lease frees its blocks while the blocks are being sent."""

    def drop(self: leases.Leases, key: Key) -> None:
        if key in self._leases:
            self._release(key)

    patch.setattr(leases.Leases, "drop", drop)
    patch.setattr(leases.Leases, "unpin", lambda self, key: None)


def keep_sequences_of_closed_streams(patch: pytest.MonkeyPatch) -> None:
    """Inject a bug: closing a stream does not free its sequences and leases."""

    def close(self: Worker, session: Session) -> None:
        self.sessions.pop(session.number, None)

    patch.setattr(Worker, "close", close)


def ignore_gaps_of_cache_events(patch: pytest.MonkeyPatch) -> None:
    """Inject a bug: a router applies cache events although earlier ones are missing."""

    def apply_events(self: CacheFeed, events: CacheEvents, now: float) -> ResyncCache | None:
        feed = self._feeds.get(events.worker)
        if feed is not None:
            feed.next_number = events.first
        return apply_events_of_product(self, events, now)

    apply_events_of_product = CacheFeed.apply_events
    patch.setattr(CacheFeed, "apply_events", apply_events)


def ignore_incarnations_of_cache_events(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheFeed, "_check_incarnation", lambda self, feed, incarnation: None)


def ignore_contradictions_in_cache_events(patch: pytest.MonkeyPatch) -> None:
    """Inject a bug: a router stores blocks although no worker can report them like this."""
    patch.setattr(cache_feed, "error_in_chains", lambda change, holds: "")


def keep_blocks_of_lost_workers(patch: pytest.MonkeyPatch) -> None:
    """Inject a bug: the prefix index keeps the blocks of a worker's earlier stream."""
    patch.setattr(PrefixIndex, "forget", lambda self, worker: None)


def omit_evictions(patch: pytest.MonkeyPatch) -> None:
    """Inject a bug: a worker does not report the blocks that it evicts."""
    patch.setattr(BlockChanges, "evict", lambda self, digest: self.stored.pop(digest, None))


def forget_answers_at_admission(patch: pytest.MonkeyPatch) -> None:
    """Inject a bug: a continued answer has a matcher that has seen only the latest token."""

    def advance(self: GrammarMask, log: Ints, num_prompt: int) -> None:
        if not self._num_seen:
            self._num_seen = max(len(log) - num_prompt - 1, 0)
        advance_of_product(self, log, num_prompt)

    advance_of_product = GrammarMask.advance
    patch.setattr(GrammarMask, "advance", advance)


def keep_masks_of_earlier_sequences(patch: pytest.MonkeyPatch) -> None:
    """Inject a bug: a row keeps the mask of an earlier sequence with the same constraint."""

    def admit(
        self: TokenMasks, row: int, params: SamplingParams, grammar: CompiledGrammar | None
    ) -> None:
        admit_of_product(self, row, params, grammar)
        if params.structured_outputs is not None:
            self._rows[row] = kept.setdefault((id(self), row, params), self._rows[row])

    kept: dict[tuple[int, int, SamplingParams], tuple[MaskProcessor, ...]] = {}
    admit_of_product = TokenMasks.admit
    patch.setattr(TokenMasks, "admit", admit)


def count_reasoning_from_the_admission(patch: pytest.MonkeyPatch) -> None:
    """Inject a bug: the reasoning of a continued answer counts from its first new token."""

    def exclude(self: ReasoningEnd, words: Words, log: Ints, num_prompt: int) -> None:
        first = vars(self).setdefault("first", len(log))
        exclude_of_product(self, words, log, max(first, num_prompt))

    exclude_of_product = ReasoningEnd.exclude
    patch.setattr(ReasoningEnd, "is_active", lambda self, index: True)
    patch.setattr(ReasoningEnd, "exclude", exclude)


BUGS: Sequence[Inject] = (
    count_reasoning_from_the_admission,
    forget_answers_at_admission,
    keep_masks_of_earlier_sequences,
    ignore_gaps_of_cache_events,
    ignore_incarnations_of_cache_events,
    ignore_contradictions_in_cache_events,
    keep_blocks_of_lost_workers,
    omit_evictions,
    deliver_duplicates,
    ignore_epochs,
    ignore_writers,
    unpin_at_the_credit,
    ignore_checksums,
    complete_transfers_early,
    reuse_blocks_being_written,
    reuse_blocks_being_sent,
    keep_sequences_of_closed_streams,
)


def first_failing(seeds: range) -> int | None:
    return next((seed for seed in seeds if failure_of(schedule_of(seed))), None)


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_an_injected_bug_is_found(bug: Inject, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert first_failing(range(600)) is not None


def test_a_failing_seed_is_shrunk_to_a_small_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ignore_checksums(monkeypatch)
    seed = first_failing(range(200))
    assert seed is not None
    assert main(["simulate", "faults", "--processes=1", "--schedules=1", f"--first={seed}"]) == 1
    output = capsys.readouterr().out
    small = shrunk(schedule_of(seed))
    assert f"  {command_of(small)}\n" in output
    assert len(small.requests) <= 2
    assert [fault.kind for fault in small.faults] == ["corrupt blocks"]
    assert main(command_of(small).split()[1:]) == 1
    assert "failed: " in capsys.readouterr().err
    monkeypatch.undo()
    assert main(command_of(small).split()[1:]) == 0


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seed", "x"], "argument --seed: invalid int value: 'x'"),
        (["--seed", "-1"], "--seed must be from 0 to 2^63 - 1"),
        (["--faults", "1"], "--requests, --faults and --log need --seed"),
        (["--seed", "1", "--faults", "x"], "--faults 'x': expected 'none', or numbers as in 0,3,7"),
        (["--seed", "1", "--requests", "99"], "--requests: expected numbers from 0 to "),
        (["--schedules", "0"], "--schedules must be 1 or more"),
        (["--processes", "0"], "--processes must be 1 or more"),
        (["--seed", "1", "--log", "/nowhere/log"], "No such file or directory"),
        (["--sead", "1"], "unrecognized arguments"),
    ],
)
def test_invalid_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert_refused(main, ["simulate", "faults", *options], message, capsys)


def test_an_unknown_kind_of_simulation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "weather"]) == 2
    assert capsys.readouterr().err.startswith("penstock simulate: unknown kind 'weather'; known ")
    with pytest.raises(SystemExit):
        main(["simulate"])
    assert "faults" in capsys.readouterr().out
