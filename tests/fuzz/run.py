"""The fuzz run: draws inputs by a seed, sends each to a router, and stops at the first problem."""

import asyncio
import contextlib
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.internal.conjecture.engine import ConjectureRunner

from tests.fuzz.inputs import Input
from tests.fuzz.strategies import HttpRoute, inputs
from tests.fuzz.target import Target, target
from tests.support.memory import resident_bytes
from tests.support.served_router import model_folder

PART = 500
"""Number of inputs that are drawn with one seed. Hypothesis keeps all inputs of a seed in
memory."""
COMPANION_EVERY = 20
MAX_TRIES = 200
"""Largest number of inputs that are sent in the search for a smaller failing input."""
MAX_GROWTH = 64 << 20
"""Largest allowed growth of the resident memory in bytes."""


@dataclass
class Result:
    """Counts of a run, and the smallest input with a problem, if there was one."""

    num_inputs: int = 0
    failing: Input | None = None
    problem: str = ""
    # Growth of the resident memory in bytes since the end of the first part of the run.
    growth: int = 0
    longest_callback: float = 0.0  # longest CPU time of a callback in seconds
    seconds: float = 0.0
    reached: Counter[str] = field(default_factory=Counter)


class Found(Exception):
    """Raised if an input causes a problem."""


class Session:
    """A target on an event loop of its own."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.runner = self._stack.enter_context(asyncio.Runner())
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        self._context = target(model_folder(Path(folder)))
        # Hashes of sent inputs, because hypothesis draws many inputs again.
        self.sent: set[int] = set()
        self.target: Target = self.runner.run(self._context.__aenter__())

    def close(self) -> None:
        self.runner.run(self._context.__aexit__(None, None, None))
        self._stack.close()


def run(num_inputs: int, seed_: int, tell: Callable[[str], None] = lambda line: None) -> Result:
    """Send `num_inputs` inputs, or fewer if one of them causes a problem."""
    result, session = Result(), Session()
    began = time.perf_counter()
    before = 0
    try:
        for part in itertools.count():
            if result.num_inputs >= num_inputs or result.problem:
                break
            _run_part(session, num_inputs, seed_ * 1_000_003 + part, result)
            before = before or resident_bytes()
            tell(f"{result.num_inputs} inputs, {time.perf_counter() - began:.0f} s")
        result.problem = result.problem or session.runner.run(session.target.settle())
        result.longest_callback = session.target.times.longest
        result.growth = resident_bytes() - before
    finally:
        session.close()
    if not result.problem and result.growth > MAX_GROWTH:
        result.problem = f"{result.growth >> 20} MiB of memory are not given back"
    result.seconds = time.perf_counter() - began
    return result


def _run_part(session: Session, num_inputs: int, seed_: int, result: Result) -> None:
    """Send up to `PART` inputs; after a problem, hypothesis looks for a smaller input."""
    tries = 0

    def send(given_: Input) -> None:
        nonlocal tries
        is_over = tries >= MAX_TRIES or (result.num_inputs >= num_inputs and not result.problem)
        if is_over or hash(given_) in session.sent:
            return
        session.sent.add(hash(given_))
        tries += bool(result.problem)
        result.num_inputs += not result.problem
        problem = check(session, given_, result.num_inputs % COMPANION_EVERY == 0)
        if problem:
            late = session.target.late
            result.failing, result.problem = late[0] if late else (given_, problem)
            if session.target.is_spoiled:  # every later input would fail too
                tries = MAX_TRIES
            raise Found(problem)

    reached = session.target.reached
    try:
        draw(session.target.routes, PART, seed_, send)
    except Exception:
        if not result.problem:
            raise
        # `result` has the smallest failing input, even if hypothesis could not make it fail again.
    result.reached += reached
    reached.clear()


def draw(
    routes: Sequence[HttpRoute], count: int, seed_: int, send: Callable[[Input], None]
) -> None:
    """Draw about `count` inputs and call `send` with each; after an error, draw smaller inputs."""
    kind = settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )

    def send_one(given_: Input) -> None:
        send(given_)

    # Turn off mutation: hypothesis would also mutate each new input. Most mutated inputs have been
    # sent before, and drawing them takes half of the time of a run.
    with mock.patch.object(ConjectureRunner, "generate_mutations_from"):
        seed(seed_)(kind(given(inputs(routes))(send_one)))()


def check(session: Session, given_: Input, with_companion: bool) -> str:
    """Send one input to the session's target; return its problem, or an empty string."""
    problem = session.runner.run(session.target.check(given_))
    if not problem and with_companion:
        problem = session.runner.run(session.target.swap_companion())
    return problem


def replay(given_: Input) -> str:
    """Send one input to a new router; return its problem, or an empty string."""
    session = Session()
    try:
        problem = session.runner.run(session.target.swap_companion())
        problem = problem or check(session, given_, True)
        return problem or session.runner.run(session.target.settle())
    finally:
        session.close()
