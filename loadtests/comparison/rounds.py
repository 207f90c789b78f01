"""Runs rounds of measurements.

The order of the engines rotates from round to round, and only one engine runs at a time.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.loadtests.comparison.engines import HERE, Engine
from penstock.loadtests.comparison.environments import python_of
from penstock.loadtests.comparison.process import EngineProcess
from penstock.loadtests.comparison.work import EngineRun, Work, note_limits, run_engine, warm_up

LIMITS = Engine("limits", "The machine", "on_limits", HERE)
_KV_GIB = 2

Report = Callable[[str], None]


class Rounds:
    """Context manager that runs the measurements.

    Each engine starts when it is first needed. An engine that can be paused stays paused while
    other engines run. Engines that cannot be paused are restarted for each round. `one_at_a_time`
    is for models that do not fit into memory together: all engines are then restarted for each
    round.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        model: Path,
        threads: int,
        work: Work,
        cache: Path,
        one_at_a_time: bool = False,
        kv_cache_dtype: str = "auto",
    ) -> None:
        self.engines = engines
        self.about: dict[str, dict[str, Any]] = {}
        self._pythons = {each.name: python_of(each.environment, cache) for each in engines}
        self._work = work
        self._one_at_a_time = one_at_a_time
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        self._vocab_size = int(config["vocab_size"])
        self._options = {
            "model": str(model),
            "threads": threads,
            "num_requests": work.requests,
            "max_model_len": work.max_model_len,
            "kv_gib": _KV_GIB,
            "kv_cache_dtype": kv_cache_dtype,
        }
        self._awake: dict[str, EngineProcess] = {}

    def __enter__(self) -> "Rounds":
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        for process in self._awake.values():
            process.close(at_once=kind is not None)

    def run(
        self, count: int, report: Report, done: Callable[[EngineRun], None]
    ) -> Iterator[list[EngineRun]]:
        """Yield the measurements of all engines, one list per round. Raises EngineFailed."""
        for number in range(count):
            shift = number % len(self.engines)
            runs = []
            for engine in (*self.engines[shift:], *self.engines[:shift]):
                report(f"round {number + 1} of {count}: {engine.title}")
                runs.append(self._run_engine(engine, number))
                done(runs[-1])
            yield runs

    def _run_engine(self, engine: Engine, number: int) -> EngineRun:
        with self._process(engine) as process:
            process.pause()
            limits = note_limits(self._limits())
            process.resume()
            return run_engine(process, self._work, self._vocab_size, number, limits)

    def _limits(self) -> EngineProcess:
        if "limits" not in self._awake:
            python = python_of(HERE, Path())
            self._awake["limits"] = EngineProcess(LIMITS, python, self._options)
        return self._awake["limits"]

    @contextmanager
    def _process(self, engine: Engine) -> Iterator[EngineProcess]:
        """Start and warm up the engine, or resume it, and yield it.

        On exit, the engine is paused or closed.
        """
        process = self._awake.get(engine.name)
        if process is None:
            process = EngineProcess(engine, self._pythons[engine.name], self._options)
            self._awake[engine.name] = process
            self.about[engine.name] = process.about
            warm_up(process, self._work, self._vocab_size)
        else:
            process.resume()
        yield process
        if engine.fresh or self._one_at_a_time:
            process.close()
            del self._awake[engine.name]
        else:
            process.pause()
