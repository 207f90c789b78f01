"""Runs the engine in its own thread, which takes commands and reports the results of steps.

The event loop and this thread never wait for each other. A command is a function in an inbox; the
thread calls it before the next step. The result of a step is passed to the event loop in one call.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

from penstock.common.worker_load import WorkerLoad
from penstock.workers.engine.engine import Engine, make_stepper
from penstock.workers.engine.results import StepResult
from penstock.workers.engine.stepper import OverlapStepper, SyncStepper
from penstock.workers.health.watchdog import ProgressTimer
from penstock.workers.parallel.collectives import RankLost

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[Engine], Any]
    reply: asyncio.Future[Any] | None


@dataclass(frozen=True, slots=True)
class _Reply:
    future: asyncio.Future[Any]
    value: Any
    error: Exception | None

    def resolve(self) -> None:
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(self.error)


class EngineThread:
    """A thread that runs an engine.

    Args:
        engine: the engine; from now on only this thread may use it.
        deliver: called on the event loop with each step's result and the load after that step.
        fatal: called on the event loop with the exception that ended the engine.
        timer: watchdog timer; it runs while there is something to compute. None: no watchdog.
    """

    def __init__(
        self,
        engine: Engine,
        deliver: Callable[[StepResult, WorkerLoad], None],
        fatal: Callable[[BaseException], None],
        timer: ProgressTimer | None = None,
    ) -> None:
        self._engine = engine
        self._timer = ProgressTimer("unwatched engine", inf) if timer is None else timer
        self._deliver = deliver
        self._fatal = fatal
        self._loop = asyncio.get_running_loop()
        self._inbox: deque[_Command] = deque()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def post(self, run: Callable[[Engine], object]) -> None:
        """Queue a function to run before the next step. Callable from any thread."""
        self._put(_Command(run, None))

    def call(self, run: Callable[[Engine], T]) -> asyncio.Future[T]:
        """Queue a function like `post`; return a future of its result. Call on the event loop."""
        answer: asyncio.Future[T] = self._loop.create_future()
        self._put(_Command(run, answer))
        return answer

    def stop(self) -> None:
        """Signal the thread to end after the step in flight; return without waiting."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self, seconds: float) -> None:
        """Block until the thread has ended, at most `seconds`. Do not call on the event loop."""
        self._thread.join(seconds)

    def _put(self, command: _Command) -> None:
        with self._changed:
            self._inbox.append(command)
            self._changed.notify_all()

    def _run(self) -> None:
        steps, pulse = make_stepper(self._engine, self._changed), self._timer
        try:
            while (commands := self._next_commands(steps)) is not None:
                pulse.begin()
                self._apply(commands)
                result = steps.advance(bool(commands))
                if result.output is not None:
                    pulse.progressed(self._engine.outputs.times.longest)
                # Commands may change the load, so report it after them. If a step is in flight, the
                # load is reported when that step ends.
                if not result.empty or (commands and not steps.busy):
                    result.cache = self._engine.cache_reporter.report()
                    self._call_on_loop(self._deliver, result, self._engine.load())
                steps.plan_next()
                if not steps.busy:
                    pulse.idle()
        except BaseException as error:
            log.critical("the engine failed; the worker stops", exc_info=True)
            self._call_on_loop(self._fatal, error)
        finally:
            pulse.idle()
            steps.stop()
            with suppress(RankLost):
                self._engine.stop()

    def _next_commands(self, steps: SyncStepper | OverlapStepper) -> list[_Command] | None:
        """Wait for commands or for a step to commit; return the commands, or None to stop."""
        with self._changed:
            if not (steps.due or steps.busy or self._inbox):
                self._engine.idle()
            self._changed.wait_for(lambda: steps.due or self._inbox or self._stopping)
            commands = list(self._inbox)
            self._inbox.clear()
        return None if self._stopping else commands

    def _apply(self, commands: list[_Command]) -> None:
        answers = []
        for command in commands:
            value, error = None, None
            try:
                value = command.run(self._engine)
            except Exception as raised:
                if command.reply is None:
                    raise
                error = raised
            if command.reply is not None:
                answers.append(_Reply(command.reply, value, error))
        if answers:  # reply to the commands now, before the step runs
            self._call_on_loop(_resolve_all, answers)

    def _call_on_loop(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # raised if the event loop is closed
            self._loop.call_soon_threadsafe(function, *args)


def _resolve_all(answers: list[_Reply]) -> None:
    for answer in answers:
        answer.resolve()
