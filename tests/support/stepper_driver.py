"""Drives an overlap stepper step by step."""

import threading
from collections.abc import Callable

from penstock.workers.engine.engine import Engine, make_stepper
from penstock.workers.engine.results import StepResult
from penstock.workers.engine.stepper import OverlapStepper
from penstock.workers.scheduling.sequence import Key


class StepperDriver:
    """Advances an overlap stepper on request, and collects its answers and counts."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.changed = threading.Condition()
        stepper = make_stepper(engine, self.changed)
        assert isinstance(stepper, OverlapStepper)
        self.stepper = stepper
        self.answers: dict[Key, list[int]] = {}
        self.failed: list[Key] = []
        self.num_ended = 0
        self.num_ahead = 0

    def advance(self, command: Callable[[Engine], object] | None = None) -> StepResult:
        """Run one iteration of the engine thread, after `command` or once a step has ended."""
        if command is None:
            with self.changed:
                assert self.changed.wait_for(lambda: self.stepper.due, timeout=60)
        else:
            command(self.engine)
        result = self.stepper.advance(command is not None)
        if result.output is not None:
            columns = zip(
                result.output.keys, result.output.tokens.tolist(), result.logprobs, strict=True
            )
            for key, token, _ in columns:
                self.answers.setdefault(key, []).append(token)
        self.failed += result.failed
        self.num_ended += len(result.finished) + len(result.failed)
        self.stepper.plan_next()
        self.num_ahead += len(self.engine.batcher._in_flight.plans) == 2
        return result
