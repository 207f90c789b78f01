"""Random variation of step times, as a function of seed, worker and step number.

Steps therefore have the same times in every run with the same seed, even if they are
fast-forwarded.
"""

from functools import lru_cache
from zlib import crc32

import numpy as np

from penstock.loadtests.simulator.model.timing import Floats

NUM_FACTORS = 1 << 16
"""Number of drawn factors. All workers of a run share them, each in an order of its own."""


class StepJitter:
    """Factors of a worker's step times. They are independent and log-normal, with mean 1.

    Args:
        deviation: standard deviation of the logarithm of a step's time.
        seed: the same seed gives the same factors.
        worker: name of the worker.
    """

    def __init__(self, deviation: float, seed: int, worker: str) -> None:
        self._factors = _drawn(deviation, seed)
        number = crc32(worker.encode())
        self._first = number
        self._stride = (number >> 15) | 1  # an odd stride makes a worker use every factor

    def factors(self, step: int, num: int) -> Floats:
        """Return the factors [num] of consecutive steps from number `step` on."""
        index = (self._first + self._stride * (step + np.arange(num))) % NUM_FACTORS
        found: Floats = self._factors[index]
        return found


@lru_cache(maxsize=4)
def _drawn(deviation: float, seed: int) -> Floats:
    random = np.random.Generator(np.random.Philox(key=[seed, 3]))
    factors: Floats = np.exp(deviation * random.standard_normal(NUM_FACTORS))
    factors /= factors.mean()
    return factors
