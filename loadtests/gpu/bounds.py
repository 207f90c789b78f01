"""What the device can do at most: bytes a second of a copy, operations a second of a product."""

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
    """Measured in the run that uses them."""

    bytes_per_second: float = math.nan  # read and written; this and the next: NaN if not known
    flops_per_second: float = math.nan  # of a square product in the dtype of the weights

    @classmethod
    def read(cls, path: Path | None) -> "Bounds":
        """As the section left them; unknown where it failed, which ends no other section."""
        return cls(**(read_figures(path) if path is not None else {}))

    def floor(self, num_bytes: float, num_flops: float) -> float:
        """Seconds that so much takes at least; NaN where that is not known."""
        if math.isnan(self.bytes_per_second):
            return math.nan
        return max(num_bytes / self.bytes_per_second, num_flops / self.flops_per_second)


def measure(options: Options) -> Bounds:
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
