"""Simulates the times of a device, a router and a network; a step follows a roofline model.

seconds = launch + sequence x sequences + max(compute, memory)
compute = token x tokens + pair x pairs      (pair: a prompt token and a position it attends to)
memory  = weights + kv_token x positions read

Workers that share the cores of a machine slow each other down: the time is multiplied by
`1 + sharing x other workers that compute when the step begins`.
"""

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import yaml

from penstock.workers.scheduling.sequence import StepPlan
from penstock.workers.scheduling.step_work import step_work

Floats: TypeAlias = npt.NDArray[np.float64]


class BadTiming(ValueError):
    """Raised if the timing file cannot be used. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Parameters of the time model. The defaults are for Llama 3 70B in 16 bits on four H100.

    The defaults are calculated, not measured: 140 GB of weights read at 4 x 2.7 TB/s, 140 GFLOP per
    token at 4 x 450 TFLOP/s, 320 KiB of KV per token. Router and engine take no time by default.
    """

    launch: float = 0.005
    token: float = 78e-6
    pair: float = 1.5e-9
    weights: float = 0.013
    kv_token: float = 30e-9
    kv_bytes: float = 320 * 1024.0  # bytes of KV that a KV transfer sends per position
    sequence: float = 0.0  # seconds per sequence of a step, for scheduling, sampling and sending
    transfer: float = 0.0  # fixed seconds per KV transfer; 0 means the value of the cluster
    bandwidth: float = 0.0  # bytes per second of KV transfers; 0 means the value of the cluster
    request: float = 0.0  # seconds per request outside of the engine (client, network, router)
    request_token: float = 0.0  # additional seconds per prompt token of a request
    router: float = 0.0  # seconds per request at the router, which handles one at a time
    sharing: float = 0.0  # relative slowdown of a step for each other worker that computes
    jitter: float = 0.0  # standard deviation of the logarithm of a step's time

    def prefill(self, num_tokens: int, chunk: int) -> float:
        """Return the seconds to prefill a single prompt in chunks of `chunk` tokens."""
        starts = np.arange(0, num_tokens, chunk)
        sizes = np.minimum(chunk, num_tokens - starts)
        compute = self.token * sizes + self.pair * sizes * (starts + sizes / 2)
        memory = self.weights + self.kv_token * (starts + sizes)
        return float((self.launch + self.sequence + np.maximum(compute, memory)).sum())

    def decode(self, context: float, batch: int = 1) -> float:
        """Return the seconds of one decode step of `batch` sequences of length `context`."""
        memory = self.weights + self.kv_token * batch * context
        return self.launch + self.sequence * batch + max(self.token * batch, memory)

    def decodes(self, plan: StepPlan, num: int) -> Floats:
        """Return the seconds of `num` decode steps; each step adds one token to each sequence."""
        batch = len(plan.context_lens)
        positions = int(plan.context_lens.sum(dtype=np.int64)) + batch * np.arange(num)
        memory = self.weights + self.kv_token * positions
        seconds: Floats = (
            self.launch + self.sequence * batch + np.maximum(self.token * batch, memory)
        )
        return seconds

    def step(self, plan: StepPlan) -> float:
        """Return the seconds of a step that may contain prefill and decode."""
        work = step_work(plan)
        memory = self.weights + self.kv_token * work.positions
        compute = self.token * work.tokens + self.pair * work.pairs
        return self.launch + self.sequence * work.sequences + max(compute, memory)


def read_timing(path: Path) -> Timing:
    """Read a YAML file that sets some of the parameters and return all of them.

    Raises BadTiming and OSError.
    """
    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadTiming(f"{path}: expected YAML ({str(error).splitlines()[0]})") from None
    names = [each.name for each in fields(Timing)]
    if not isinstance(given, dict) or not given:
        raise BadTiming(
            f"{path}: expected lines like `NAME: NUMBER`, where NAME is one of {', '.join(names)}"
        )
    return Timing(**{str(name): _number(path, name, value, names) for name, value in given.items()})


def _number(path: Path, name: object, value: Any, names: list[str]) -> float:
    if name not in names:
        raise BadTiming(f"{path}: unknown name {name!r}: expected one of {', '.join(names)}")
    try:
        number = float(value)  # YAML 1.1 parses a number such as 78e-6 as a string
    except (TypeError, ValueError):
        number = math.nan
    if isinstance(value, bool) or not 0 <= number < math.inf:
        raise BadTiming(f"{path}: {name} must be a finite number of at least 0, not {value!r}")
    return number
