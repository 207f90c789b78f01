"""Adapter that measures the machine's limits: matmul rates and memory read bandwidth."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ROWS, _WIDTH = 512, 2048  # shapes of the matmul: [rows, width] x [width, width]
_READ = 64 << 20  # float32 elements to read: 256 MiB, more than fits in any cache
_SECONDS = 0.6  # duration of each measurement, in seconds


@contextmanager
def engine(options: dict[str, Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield a function `generate` that ignores its arguments and measures the machine.

    The function returns [[MFLOP/s, int8 MOP/s, MB/s]].
    """
    torch.set_num_threads(options["threads"])
    rows, weight = torch.randn(_ROWS, _WIDTH), torch.randn(_WIDTH, _WIDTH)
    # `torch._int_mm` is not used, since it takes seconds per matmul on CPUs without VNNI.
    int8_weight = torch.ops.quantized.linear_prepack(
        torch.quantize_per_tensor(weight, 0.05, 0, torch.qint8), None
    )
    matrix = torch.ones(_READ // 4096, 4096)
    vector = torch.ones(4096)

    def measure(_: list[list[int]], __: int) -> list[list[int]]:
        products = 2 * _ROWS * _WIDTH * _WIDTH
        rates = (
            products / _best(lambda: torch.mm(rows, weight)),
            products / _best(lambda: torch.ops.quantized.linear_dynamic(rows, int8_weight, False)),
            4 * _READ / min(_best(matrix.sum), _best(lambda: torch.mv(matrix, vector))),
        )
        return [[int(rate / 1e6) for rate in rates]]

    yield measure, {"torch": torch.__version__, "product": f"{_ROWS} x {_WIDTH} x {_WIDTH}"}


def _best(work: Callable[[], Any]) -> float:
    """Call `work` repeatedly for _SECONDS. Return the seconds of the fastest call."""
    work()
    seconds, stop = [], time.perf_counter() + _SECONDS
    while time.perf_counter() < stop:
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
