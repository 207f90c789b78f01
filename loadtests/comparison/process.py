"""Runs an engine in a separate process, controls it through pipes, and can pause it."""

import json
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import penstock
from penstock.loadtests.comparison.engines import Engine

_ADAPTERS = Path(__file__).parent / "adapters"
_START_SECONDS = 600.0  # seconds for the start, which may convert the checkpoint or compile
_ANSWER_SECONDS = 600.0
_END_SECONDS = 90.0  # seconds for the exit, which may drain a cluster
_PAUSE_SECONDS = 5.0
_LOG_TAIL = 4000  # characters of the log that an error contains


class EngineFailed(RuntimeError):
    """Raised if an engine did not start, failed or returned a wrong answer.

    The message names the engine.
    """


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one `generate` call."""

    seconds: float  # duration of the call, in seconds
    tokens: list[list[int]]  # new tokens, indexed [prompt][index]


class EngineProcess:
    """A running engine that is ready for `generate`. The caller must close it.

    `about` is the adapter's description of the engine: versions and number formats.
    """

    def __init__(self, engine: Engine, python: Path, options: dict[str, Any]) -> None:
        self.engine = engine
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        own = {"form": engine.form.name, "paused": not engine.fresh}
        settings = {**options, **own}
        command = [str(python), str(_ADAPTERS / "host.py"), engine.adapter, json.dumps(settings)]
        # The engine gets its own session, so that Ctrl-C in the terminal does not interrupt it.
        self._process = subprocess.Popen(
            command,
            env=_variables(engine),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            start_new_session=True,
        )
        try:
            self.about: dict[str, Any] = self._answer(_START_SECONDS)["about"]
        except BaseException:
            self.close(at_once=True)
            raise

    def generate(self, prompts: Sequence[Sequence[int]], output_len: int) -> Answer:
        """Generate `output_len` tokens for each prompt, in one batch. Raises EngineFailed."""
        question = json.dumps({"prompts": list(prompts), "output_len": output_len})
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the process has exited, which `_answer` reports
            self._process.stdin.write(question.encode() + b"\n")
            self._process.stdin.flush()
        reply = self._answer(_ANSWER_SECONDS)
        answer = Answer(reply["seconds"], reply["tokens"])
        lengths = {len(tokens) for tokens in answer.tokens}
        if prompts and (len(answer.tokens) != len(prompts) or lengths != {output_len}):
            raise EngineFailed(
                f"{self.engine.title} returned {len(answer.tokens)} answers with lengths "
                f"{sorted(lengths)}: expected {len(prompts)} answers of {output_len} tokens each"
            )
        return answer

    def pause(self) -> None:
        """Suspend all processes of the engine.

        Waits up to 5 s for each process to stop.
        """
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                process.suspend()
                deadline = time.monotonic() + _PAUSE_SECONDS
                while process.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
                    time.sleep(0.001)

    def resume(self) -> None:
        """Continue all suspended processes of the engine."""
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def tree(self) -> list[psutil.Process]:
        """Return the engine's process and all its descendants, or [] if the engine has exited."""
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def close(self, at_once: bool = False) -> None:
        """End the engine and its descendants. If `at_once`, interrupt a running computation."""
        with _undisturbed():
            self._close(at_once)

    def _close(self, at_once: bool) -> None:
        tree = self.tree()
        self.resume()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        if at_once and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        # A cluster must shut down its actors gracefully, while other engines can be killed.
        gentle = self.engine.fresh or not at_once
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS if gentle else 1.0)
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(tree, timeout=10.0)
        self._process.wait()
        self._process.stdout.close()
        self._words.close()

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            how = "exited" if ready else f"did not reply within {seconds:.0f} s"
            raise EngineFailed(
                f"{self.engine.title} {how}; last lines of its log:\n{self._read_log_tail()}"
            )
        return dict(json.loads(line))

    def _read_log_tail(self) -> str:
        self._words.seek(max(0, self._words.seek(0, os.SEEK_END) - _LOG_TAIL))
        return self._words.read().decode(errors="replace").strip()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore SIGINT and SIGTERM, since a second Ctrl-C would leave processes behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _variables(engine: Engine) -> dict[str, str]:
    """Return the engine's environment variables, without overrides of its thread count."""
    dropped = ("PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    variables = {name: value for name, value in os.environ.items() if name not in dropped}
    if engine.is_ours:  # lets the process import Penstock from this tree instead of a package
        variables["PYTHONPATH"] = str(Path(penstock.__file__).parent.parent)
    return variables
