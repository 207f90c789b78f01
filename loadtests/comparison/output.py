"""Outputs a record: as tables on the terminal, a JSON file and an HTML page."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock.loadtests.comparison.engines import BY_NAME
from penstock.loadtests.comparison.page import brief, page
from penstock.loadtests.comparison.record import Record
from penstock.loadtests.comparison.summary import PHASES, UNITS, Row

HEADINGS = {"throughput": "throughput", "tpot": "TPOT at batch 1", "ttft": "TTFT, long prompt"}


def show(record: Record) -> None:
    """Print a table per phase: medians, fractions of the machine's limits, and speedups."""
    rows = record.rows()
    for phase in PHASES:
        table = Table(title=f"{HEADINGS[phase]}, {UNITS[phase]}", title_justify="left")
        table.add_column("engine")
        for heading in ("median", "of the limit", "our speedup"):
            table.add_column(heading, justify="right")
        for row in rows:
            table.add_row(row.engine.title, *_cells(row, phase))
        Console().print(table)
    print("in brackets: 10th to 90th percentile; speedup above 1: Penstock is faster (per round)")
    for row in rows:
        if row.tokens:
            agreement = f"{row.tokens.agreeing} of {row.tokens.total} tokens"
            judge = BY_NAME[row.engine.reference].title
            print(f"{row.engine.title}: {agreement} before the first that differs from {judge}")
    for name, why in record.left_out.items():
        print(f"not measured: {name}: {why}")


def _cells(row: Row, phase: str) -> list[str]:
    return [
        brief(row.values[phase]),
        f"{100 * row.reached[phase].median:.0f}%",
        brief(row.ahead[phase]) if row.ahead else "",
    ]


def save(record: Record, stem: Path) -> None:
    """Write the record to STEM.json and STEM.html."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    json_file, html_file = (stem.with_name(f"{stem.name}.{end}") for end in ("json", "html"))
    json_file.write_text(json.dumps(record.as_json()) + "\n", encoding="utf-8")
    html_file.write_text(page(record), encoding="utf-8")
    print(f"written: {json_file}, {html_file}")
