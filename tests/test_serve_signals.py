"""Signals that end `penstock serve` before and while it starts."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from io import StringIO

import pytest
from rich.console import Console

from penstock.cli import checkpoint, serve
from penstock.cli.view import Bars
from penstock.cluster.spec.spec import parse

SMALL = checkpoint.SHIPPED.parent / "demo-small"


@pytest.fixture
def own_handlers() -> Iterator[None]:
    """Use the default signal handlers, and restore the others after the test.

    Under `nohup`, SIGHUP is ignored, and `serve` keeps ignoring it.
    """
    before = [signal.signal(each, signal.SIG_DFL) for each in serve.SIGNALS]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in zip(serve.SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_handlers")
def test_first_signal_requests_a_stop_and_second_exits_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "_exit", lambda code: calls.append(code))
    interrupts = serve.Interrupts()
    interrupts.abandon = lambda: calls.append("abandoned")
    interrupts.install()
    interrupts.first = lambda: calls.append("first")
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGTERM)
    assert interrupts.wanted
    assert calls == ["first"], "one press of Ctrl-C may arrive twice"
    now[0] += 2 * serve.ECHO_SECONDS
    signal.raise_signal(signal.SIGINT)
    assert calls == ["first", "abandoned", serve.STOPPED_BY_SIGNAL]


@pytest.mark.usefixtures("own_handlers")
def test_signal_is_recorded_even_if_its_exception_is_lost() -> None:
    interrupts = serve.Interrupts()
    interrupts.install()
    assert not interrupts.wanted
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert interrupts.wanted


@pytest.mark.usefixtures("own_handlers")
@pytest.mark.parametrize("number", serve.SIGNALS)
def test_signal_during_the_import_of_ray_leaves_the_cursor_visible(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = "penstock.cluster.placement.placement_plan"  # `serve` imports this module first

    class Finder:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == first:
                signal.raise_signal(number)

    monkeypatch.delitem(sys.modules, first, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    screen = StringIO()
    bars = Bars(Console(file=screen, force_terminal=True, width=100, color_system=None))
    with closing(bars):
        assert serve.serve(parse({}), SMALL, bars, ()) == serve.STOPPED_BY_SIGNAL
    assert screen.getvalue() == "stopped\n", "the cursor was not hidden"
