import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.rank.core_sharing import (
    CoreMarks,
    CoreSharing,
    remove_unused_marks,
    threads_of_step,
)

SHARES = st.lists(st.integers(1, 64), min_size=1, max_size=8)


@given(SHARES, st.integers(0, 64))
def test_threads_of_all_computing_workers_fit_the_cores(shares: list[int], spare: int) -> None:
    cores = sum(shares) + spare
    threads = [
        threads_of_step(own, cores, shares[:at] + shares[at + 1 :]) for at, own in enumerate(shares)
    ]
    assert sum(threads) <= cores
    assert all(one >= own for one, own in zip(threads, shares, strict=True))


@given(st.integers(1, 64), st.integers(1, 64), SHARES)
def test_threads_are_between_the_share_and_the_limit(
    own: int, limit: int, others: list[int]
) -> None:
    assert threads_of_step(own, limit, []) == max(own, limit)
    assert own <= threads_of_step(own, limit, others) <= max(own, limit)


def _hold(path: Path, share: int, pipe: Connection) -> None:
    marks = CoreMarks(path)
    marks.mark(share)
    pipe.send(os.getpid())
    pipe.recv()
    marks.clear()
    pipe.send(marks.others())
    pipe.recv()


class Other:
    """Another process, which marks itself as computing until `clear` or `kill` is called."""

    def __init__(self, path: Path, share: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_hold, args=(path, share, theirs))
        self.process.start()
        theirs.close()
        self.pipe.recv()

    def clear(self) -> list[int]:
        self.pipe.send("clear")
        seen: list[int] = self.pipe.recv()
        return seen

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


@pytest.fixture
def marks(tmp_path: Path) -> Iterator[CoreMarks]:
    opened = CoreMarks(tmp_path / "marks")
    yield opened
    opened.close()


def test_marks_of_other_processes_are_seen_until_they_are_cleared(
    marks: CoreMarks, tmp_path: Path
) -> None:
    others = [Other(tmp_path / "marks", share) for share in (1, 3)]
    try:
        marks.mark(2)
        assert sorted(marks.others()) == [1, 3]
        assert sorted(others[0].clear()) == [2, 3]
        assert marks.others() == [3]
        marks.clear()
        assert others[1].clear() == []
        assert marks.others() == []
    finally:
        for each in others:
            each.kill()


def test_mark_of_a_killed_process_is_gone(marks: CoreMarks, tmp_path: Path) -> None:
    other = Other(tmp_path / "marks", 1)
    assert marks.others() == [1]
    other.kill()
    assert marks.others() == []


def test_worker_uses_all_cores_only_while_it_computes_alone(
    marks: CoreMarks, tmp_path: Path
) -> None:
    counts: list[int] = []
    sharing = CoreSharing(2, 4, marks, counts.append)
    sharing.begin_step()
    other = Other(tmp_path / "marks", 2)
    try:
        sharing.begin_step()
        sharing.begin_step()
        sharing.idle()
        assert other.clear() == []
        sharing.begin_step()
    finally:
        other.kill()
    assert counts == [4, 2, 4]


def test_worker_whose_mark_cannot_be_set_keeps_its_share(
    marks: CoreMarks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process of another container may have the same process id and lock the same bytes."""
    counts: list[int] = []
    sharing = CoreSharing(2, 8, marks, counts.append)
    with monkeypatch.context() as context:
        context.setattr(marks, "mark", _raise_blocking)
        sharing.begin_step()
        sharing.begin_step()
        sharing.idle()
    sharing.begin_step()
    assert counts == [2, 8]
    assert len(caplog.records) == 1


def _raise_blocking(num_cores: int) -> None:
    raise BlockingIOError(11, "Resource temporarily unavailable")


def test_file_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").touch()
    (tmp_path / "marks").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="marks"):
        CoreMarks(tmp_path / "marks")


def test_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=tmp_path.name):
        CoreMarks(tmp_path)


def test_file_is_removed_only_if_no_process_has_it_open(tmp_path: Path) -> None:
    path = tmp_path / "marks"
    remove_unused_marks(path)  # no error, although the file does not exist yet
    other = Other(path, 1)
    try:
        remove_unused_marks(path)
        assert path.exists()
    finally:
        other.kill()
    remove_unused_marks(path)
    assert not path.exists()
    again = CoreMarks(path)
    assert path.exists()
    again.close()
