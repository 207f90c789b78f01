"""One engine in a process of its own, asked through pipes, paused while others have their turn."""

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
_START_SECONDS = 600.0  # an export or a compilation may be part of it
_ANSWER_SECONDS = 600.0
_END_SECONDS = 90.0  # a cluster drains
_PAUSE_SECONDS = 5.0
_LOG_TAIL = 4000  # characters


class EngineFailed(RuntimeError):
    """An engine did not start, failed or answered wrongly; the message says which and how."""


@dataclass(frozen=True, slots=True)
class Answer:
    seconds: float
    tokens: list[list[int]]


class EngineProcess:
    """An engine that is ready to answer. Close it, whatever happens.

    `about` is what its adapter says of it.
    """

    def __init__(self, engine: Engine, python: Path, options: dict[str, Any]) -> None:
        self.engine = engine
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `close`)
        own = {"quantization": engine.quantization, "paused": not engine.fresh}
        settings = {**options, **own}
        command = [str(python), str(_ADAPTERS / "host.py"), engine.adapter, json.dumps(settings)]
        # A session of its own: a Ctrl-C in the terminal reaches the one who asks only.
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
        """Answer all prompts at once with so many tokens each. Raises EngineFailed."""
        question = json.dumps({"prompts": list(prompts), "output_len": output_len})
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it ended: reading will say so
            self._process.stdin.write(question.encode() + b"\n")
            self._process.stdin.flush()
        reply = self._answer(_ANSWER_SECONDS)
        answer = Answer(reply["seconds"], reply["tokens"])
        lengths = {len(tokens) for tokens in answer.tokens}
        if prompts and (len(answer.tokens) != len(prompts) or lengths != {output_len}):
            raise EngineFailed(
                f"{self.engine.title} gave {len(answer.tokens)} answers of {sorted(lengths)} "
                f"tokens; {len(prompts)} of {output_len} were asked for"
            )
        return answer

    def pause(self) -> None:
        """Returns when all of it has stopped: on a busy machine that takes a moment."""
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                process.suspend()
                deadline = time.monotonic() + _PAUSE_SECONDS
                while process.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
                    time.sleep(0.001)

    def resume(self) -> None:
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def tree(self) -> list[psutil.Process]:
        """It and all that it started."""
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def close(self, at_once: bool = False) -> None:
        """End it and all that it started; `at_once`: even while it computes."""
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
        # What a cluster started ends only with its help; of the others nothing is missed.
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
            how = "ended" if ready else f"said nothing for {seconds:.0f} s"
            raise EngineFailed(
                f"{self.engine.title} {how}; its last words:\n{self._read_log_tail()}"
            )
        return dict(json.loads(line))

    def _read_log_tail(self) -> str:
        self._words.seek(max(0, self._words.seek(0, os.SEEK_END) - _LOG_TAIL))
        return self._words.read().decode(errors="replace").strip()


@contextmanager
def _undisturbed() -> Iterator[None]:
    """An impatient second Ctrl-C must not leave processes behind."""
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
    """Its environment: threads are told in its options, so no variable tells other ones."""
    dropped = ("PYTHONPATH", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    variables = {name: value for name, value in os.environ.items() if name not in dropped}
    if engine.is_ours:  # this very tree, not another that is installed
        variables["PYTHONPATH"] = str(Path(penstock.__file__).parent.parent)
    return variables
