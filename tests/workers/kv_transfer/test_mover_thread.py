"""One thread runs all tasks in turns; a task that waits does not delay the others."""

import threading
from collections.abc import Callable

import pytest
import torch

from penstock.workers.kv_transfer.lanes import REACHED
from penstock.workers.kv_transfer.mover_thread import POLL_SECONDS, MoverThread, Task, TaskCondition


class Step:
    """A condition that the test makes true."""

    def __init__(self) -> None:
        self.is_ready = False

    def ready(self) -> bool:
        return self.is_ready


def noting(notes: list[str], name: str, *awaited: Step, done: threading.Event) -> Task:
    notes.append(f"{name} {threading.current_thread().name}")
    for step in awaited:
        yield step
        notes.append(name)
    done.set()


def names(notes: list[str]) -> list[str]:
    return [note.split()[0] for note in notes]


def test_waiting_task_delays_no_other_and_goes_on_when_it_is_ready() -> None:
    thread = MoverThread(torch.device("cpu"))
    notes: list[str] = []
    first, second, step = threading.Event(), threading.Event(), Step()
    thread.run(noting(notes, "waits", step, done=first))
    thread.run(noting(notes, "runs", Step(), done=threading.Event()))
    thread.run(noting(notes, "ends", done=second))
    assert second.wait(60)
    assert names(notes) == ["waits", "runs", "ends"]
    assert not first.is_set()
    step.is_ready = True
    thread.wake()
    assert first.wait(60)
    assert names(notes) == ["waits", "runs", "ends", "waits"]
    assert {note.split()[1] for note in notes[:3]} == {"kv-mover"}


def test_task_that_frees_something_lets_an_earlier_one_go_on() -> None:
    thread = MoverThread(torch.device("cpu"))
    step, done = Step(), threading.Event()

    def free() -> Task:
        step.is_ready = True
        yield REACHED

    thread.run(noting([], "waits", step, done=done))
    thread.run(free())
    assert done.wait(60)


def test_failed_task_ends_neither_the_thread_nor_other_tasks() -> None:
    thread = MoverThread(torch.device("cpu"))
    done = threading.Event()

    def fail() -> Task:
        yield REACHED
        raise RuntimeError("out of memory")

    thread.run(fail())
    thread.run(noting([], "ends", done=done))
    assert done.wait(60)


def test_error_of_an_awaited_condition_is_raised_in_its_task() -> None:
    class Broken:
        def ready(self) -> bool:
            raise RuntimeError("the device failed")

    thread = MoverThread(torch.device("cpu"))
    errors: list[str] = []
    done = threading.Event()

    def wait() -> Task:
        try:
            yield Broken()
        except RuntimeError as error:
            errors.append(str(error))
        yield REACHED
        done.set()

    thread.run(wait())
    assert done.wait(60)
    assert errors == ["the device failed"]


def test_gpu_polls_device_events_but_not_conditions_of_tasks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timeouts: list[float | None] = []
    waited = threading.Event()

    class RecordedCondition(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            timeouts.append(timeout)
            waited.set()
            return super().wait(timeout)

    def wait_for(condition: Callable[[], bool]) -> Task:
        yield TaskCondition(condition)
        closed.set()

    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    thread = MoverThread(torch.device("cuda"), linger_seconds=60.0)
    thread._changed = RecordedCondition()
    is_closed, closed = threading.Event(), threading.Event()
    thread.run(wait_for(is_closed.is_set))
    assert waited.wait(60)
    assert timeouts == [60.0]
    step, done = Step(), threading.Event()
    thread.run(noting([], "polls", step, done=done))
    eventually(lambda: POLL_SECONDS in timeouts)
    step.is_ready = True
    assert done.wait(60)
    assert not closed.is_set()
    eventually(lambda: timeouts[-1] == 60.0)
    is_closed.set()
    thread.wake()
    assert closed.wait(60)


def test_idle_thread_ends_and_starts_again() -> None:
    thread = MoverThread(torch.device("cpu"), linger_seconds=0.0)
    for _ in range(3):
        done = threading.Event()
        thread.run(noting([], "ends", done=done))
        assert done.wait(60)
        eventually(lambda: thread.num_threads == 0)


def eventually(condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(60_000):
        if condition():
            return
        waiting.wait(0.001)
    raise AssertionError("the condition did not become true")
