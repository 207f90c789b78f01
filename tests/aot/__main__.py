"""Compile all Triton kernels ahead of time: `python -m tests.aot [FOLDER...]` (such as `norm`).

The command needs no GPU. It writes `report.json` and `table.txt` to `build/aot`, and caches the
compiled kernels there. It fails if a kernel breaks a rule of `tests.aot.rules`, does not compile,
or is launched by no case.
"""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "build" / "aot"

# Set these variables before triton is imported, here and in the worker processes of `jobs`.
os.environ["TRITON_CACHE_DIR"] = str(FOLDER / "cache")
os.environ.pop("TRITON_INTERPRET", None)

from tests.aot.jobs import Report, forgotten, jobs_of, run  # noqa: E402

COLUMNS = (
    *("kernel", "case", "chip", "regs", "spill", "shared", "warps", "tensor core", "wide"),
    # For each innermost loop with matrix products: smallest number of buffers of a copied tile.
    "buffers",
    "in flight",  # for each of these loops: smallest number of copies that still run after a wait
)


def kernel_modules() -> dict[str, list[str]]:
    """Return the modules that define Triton kernels, by folder of `kernels/`."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "kernels").glob("*/*.py")):
        if "\n@jit" in path.read_text():
            folder = path.parent.name
            found.setdefault(folder, []).append(f"penstock.kernels.{folder}.{path.stem}")
    return found


def folders(names: list[str]) -> list[str]:
    """Return the folders `names` (if empty, all folders); exit if a folder has no cases."""
    found = sorted(path.stem for path in (ROOT / "tests" / "aot" / "cases").glob("*.py"))
    if without := kernel_modules().keys() - set(found):
        raise SystemExit(f"kernels without a file in tests/aot/cases: {', '.join(sorted(without))}")
    if unknown := set(names) - set(found):
        raise SystemExit(f"no such file in tests/aot/cases: {', '.join(sorted(unknown))}")
    return names or found


def row(report: Report) -> tuple[str, ...]:
    found = report.artefact
    head = (report.kernel, report.case, report.chip)
    if found is None:
        return (*head, *"-" * (len(COLUMNS) - len(head)))
    numbers = ("registers", "spilled", "shared_bytes", "num_warps", "tensor_core")
    loops = [
        ",".join(str(loop[name]) for loop in found["loops"]) or "-"
        for name in ("buffers", "in_flight")
    ]
    return (*head, *(str(found[name]) for name in numbers), f"{found['wide_share']:.0%}", *loops)


def table(reports: list[Report]) -> str:
    rows = [COLUMNS, *map(row, reports)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        + "\n"
        for cells in rows
    )


def main() -> int:
    started = time.monotonic()
    names = folders(sys.argv[1:])
    cases = {name: f"tests.aot.cases.{name}" for name in names}
    kernels = kernel_modules()
    left_out = [
        f"kernels/{name}: no case launches {kernel}"
        for name in names
        for kernel in forgotten(cases[name], kernels.get(name, []))
    ]
    reports = run(jobs_of(list(cases.values())))
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "table.txt").write_text(table(reports))
    (FOLDER / "report.json").write_text(json.dumps([dataclasses.asdict(each) for each in reports]))
    violations = left_out + [
        f"{each.kernel} ({each.case}) for {each.chip}: {complaint}"
        for each in reports
        for complaint in each.complaints
    ]
    for line in violations:
        print(line)
    seconds = time.monotonic() - started
    compiled = f"{len(reports)} kernels compiled in {seconds:.0f} s"
    print(f"{compiled}, {len(violations)} violations; see {FOLDER}")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
