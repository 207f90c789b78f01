"""Actors without Ray: log records for the driver, a failed start, the frozen heap."""

import asyncio
import gc
import logging
import os
import weakref

import pytest

from penstock.cluster.processes.actors import RouterActor, WorkerActor, freeze_heap, importing
from penstock.cluster.processes.event_queue import ActorFailed
from penstock.cluster.status.status_events import LogLine
from penstock.protos.serving.grpc_settings import EXPERIMENTS
from penstock.router.config import RouterConfig


class Node:
    """An object that can be part of a reference cycle."""

    other: "Node"


def test_freeze_heap_excludes_present_objects_from_later_collections() -> None:
    gc.unfreeze()  # undo a freeze by code that ran before this test
    try:
        dead, kept = Node(), Node()
        dead.other, kept.other = dead, kept
        gone = weakref.ref(dead)
        del dead
        freeze_heap()
        assert gone() is None, "unreachable cycles are collected first"
        assert gc.get_freeze_count() > 10_000
        assert all(each is not kept for each in gc.get_objects())
        later = Node()
        later.other = later
        gone = weakref.ref(later)
        del later
        gc.collect()
        assert gone() is None
    finally:
        gc.unfreeze()


def test_imports_run_without_collections_and_their_objects_are_frozen() -> None:
    phases: list[str] = []
    gc.callbacks.append(lambda phase, info: phases.append(phase))
    try:
        with importing():
            made = [Node() for _ in range(10_000)]  # enough objects to trigger a garbage collection
        assert phases == []
        assert gc.isenabled()
        assert all(each is not made[0] for each in gc.get_objects())
    finally:
        gc.callbacks.pop()
        gc.unfreeze()


@pytest.fixture
def quiet_root() -> object:
    """Remove the log handlers that an actor adds, after the test."""
    root = logging.getLogger()
    own_logger = logging.getLogger("penstock")
    before, level = list(root.handlers), own_logger.level
    yield root
    root.handlers[:] = before
    own_logger.setLevel(level)


async def test_warnings_reach_the_driver_with_the_name_of_the_process(
    quiet_root: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cluster.processes.actors.setproctitle", lambda title: None)
    actor = WorkerActor("decode worker 0, rank 0")
    waiting = asyncio.create_task(actor.next_events())
    await asyncio.sleep(0)
    logging.getLogger("anything").warning("mind the gap")
    logging.getLogger("anything").info("nothing to see")
    (line,) = await waiting
    assert isinstance(line, LogLine)
    assert line.text == "penstock: decode worker 0, rank 0: WARNING: mind the gap"
    assert (line.level, line.event) == ("warning", "log")
    assert line.fields == {"message": "mind the gap", "exception": None}


async def test_log_events_reach_the_driver_if_enabled(
    quiet_root: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cluster.processes.actors.setproctitle", lambda title: None)
    actor = WorkerActor("decode worker 0, rank 0", with_events=True)
    waiting = asyncio.create_task(actor.next_events())
    await asyncio.sleep(0)
    logging.getLogger("another").info("nothing to see")
    own_logger = logging.getLogger("penstock.anything")
    own_logger.info("sequence", extra={"fields": {"request": "r-1"}})
    try:
        raise ValueError("odd")
    except ValueError:
        own_logger.exception("it broke")
    event, failure = await waiting
    assert isinstance(event, LogLine)
    assert (event.level, event.event, event.fields) == ("info", "sequence", {"request": "r-1"})
    assert isinstance(failure, LogLine)
    assert (failure.level, failure.fields["message"]) == ("error", "it broke")
    assert "ValueError: odd" in str(failure.fields["exception"])


async def test_router_that_cannot_start_gives_a_one_line_reason(
    quiet_root: object, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setattr("penstock.cluster.processes.actors.setproctitle", lambda title: None)
    monkeypatch.setenv("GRPC_EXPERIMENTS", "")  # makes pytest restore the former value
    monkeypatch.delenv("GRPC_EXPERIMENTS")
    actor = RouterActor("router 0")
    config = RouterConfig(model=tmp_path, served_name="none")  # type: ignore[arg-type]
    with pytest.raises(ActorFailed) as failure:
        await actor.start(config)
    assert str(tmp_path) in str(failure.value)
    assert "\n" not in str(failure.value)
    assert os.environ["GRPC_EXPERIMENTS"] == EXPERIMENTS
    with pytest.raises(RuntimeError, match="not been started"):
        await actor.drain(0.0)
    await actor.stop()
