"""Times every operation that has a performance goal, and compares it with limits and peers."""

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from penstock.kernels.fallback import forbid_fallback
from penstock.loadtests.gpu.attention_work import attention_work
from penstock.loadtests.gpu.bounds import Bounds
from penstock.loadtests.gpu.options import Options, read_options
from penstock.loadtests.gpu.product_work import product_work
from penstock.loadtests.gpu.row_work import row_work
from penstock.loadtests.gpu.sections import write_figures
from penstock.loadtests.gpu.token_work import draw_work, expert_work
from penstock.loadtests.gpu.work import Work


def all_work(options: Options) -> Iterator[Callable[[], Iterable[Work]]]:
    """Yield one function per kind of operation. A function returns the operations of its kind.

    With separate functions, an error in one kind does not stop the other kinds.
    """
    device, dtype, small = options.device, options.dtype, options.small
    yield lambda: attention_work(device, dtype, small)
    yield lambda: row_work(device, dtype, small)
    yield lambda: product_work(device, dtype, small)
    yield lambda: [draw_work(device, small)]
    yield lambda: expert_work(device, dtype, small)


def measure(options: Options, bounds: Bounds) -> Iterator[dict[str, Any]]:
    """Yield the results so far after each operation."""
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    figures = {"rows": rows, "failures": failures}
    for kind in all_work(options):
        try:
            for work in kind():
                try:
                    with forbid_fallback(options.device):
                        rows.append(work.measure(options.device).figures(bounds))
                except Exception as error:
                    failures.append(f"{work.name}: {type(error).__name__}: {error}")
                yield figures
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
        yield figures


def main() -> int:
    options = read_options("operations")
    bounds = Bounds.read(options.bounds)
    for figures in measure(options, bounds):
        write_figures(options.json, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
