"""Measures the device's limits: the memory bandwidth of a copy and the FLOP/s of a matmul."""

import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from penstock.loadtests.gpu.clock import time_calls
from penstock.loadtests.gpu.options import Options, read_options
from penstock.loadtests.gpu.sections import read_figures, write_figures

COPY_BYTES, SMALL_COPY_BYTES = 1 << 31, 1 << 22
PRODUCT_SIZE, SMALL_PRODUCT_SIZE = 8192, 128


@dataclass(frozen=True, slots=True)
class Bounds:
    """The device's limits as measured in this run. A limit is NaN if it is unknown."""

    bytes_per_second: float = math.nan  # bytes that a copy reads and writes per second
    flops_per_second: float = math.nan  # FLOP/s of a square matmul, in the weights' dtype

    @classmethod
    def read(cls, path: Path | None) -> "Bounds":
        """Read the result file of the bounds section.

        If the file is missing or invalid, all limits are NaN.
        """
        return cls(**(read_figures(path) if path is not None else {}))

    def floor(self, num_bytes: float, num_flops: float) -> float:
        """Return the minimum time in seconds (roofline), or NaN if the limits are unknown."""
        if math.isnan(self.bytes_per_second):
            return math.nan
        return max(num_bytes / self.bytes_per_second, num_flops / self.flops_per_second)


def measure(options: Options) -> Bounds:
    """Measure the limits of `options.device`."""
    num_bytes = SMALL_COPY_BYTES if options.small else COPY_BYTES
    source = torch.ones(num_bytes, dtype=torch.uint8, device=options.device)
    target = torch.empty_like(source)
    copy = time_calls([lambda: target.copy_(source)], options.device)
    size = SMALL_PRODUCT_SIZE if options.small else PRODUCT_SIZE
    left, right = (
        torch.randn(size, size, device=options.device, dtype=options.dtype) for _ in range(2)
    )
    product = time_calls([lambda: left @ right], options.device)
    return Bounds(2 * num_bytes / copy.least, 2 * size**3 / product.least)


def main() -> int:
    options = read_options("bounds")
    write_figures(options.json, asdict(measure(options)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
