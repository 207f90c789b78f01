"""Writes a record as an HTML report in one self-contained file."""

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from penstock.loadtests.comparison.charts import Strip, strips
from penstock.loadtests.comparison.engines import BY_NAME
from penstock.loadtests.comparison.record import Record
from penstock.loadtests.comparison.summary import PHASES, UNITS, Row, limit, value
from penstock.loadtests.micro.ab_runner import Quantiles

_TITLES = {
    "throughput": "Throughput: {requests} prompts of {input_len} tokens, {output_len} tokens each",
    "tpot": "Time per output token at batch size 1, after a prompt of {input_len} tokens",
    "ttft": "Time to the first token of a single prompt of {long_len} tokens",
}
_BETTER = {"throughput": "more is better", "tpot": "less is better", "ttft": "less is better"}
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2733; --dim: #66727f; --line: #dde3e8; --paper: #fff;
  --ours: #0b7285; --peer: #9aa5b1; --limit: #d9480f; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6ebf0; --dim: #93a0ad; --line: #2c3640;
  --paper: #12181f; --ours: #3bc9db; --peer: #5f6c79; --limit: #ff922b; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .3rem; }
p.dim, figcaption { color: var(--dim); font-size: .87rem; }
figure { margin: 0; overflow-x: auto; } svg { width: 100%; min-width: 34rem; display: block; }
svg text { font-size: 12.5px; fill: var(--ink); } svg .tick { fill: var(--dim); font-size: 11px; }
svg .label.ours { font-weight: 600; } svg .value { font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); } .limit { stroke: var(--limit); stroke-width: 2.5; }
.bar { opacity: .45; } .bar.ours, .dot.ours { fill: var(--ours); }
.bar.peer, .dot.peer { fill: var(--peer); } .dot { stroke: var(--paper); stroke-width: .7; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .85rem; white-space: nowrap; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; } th { color: var(--dim); font-weight: 500; }
th:first-child, td:first-child, td.words { text-align: left; } tr.ours td { color: var(--ours); }
td.words { white-space: normal; }
"""


def page(record: Record) -> str:
    """Return the HTML of the report, which loads no external resources."""
    title = f"Penstock compared with other engines: {record.model}"
    return "\n".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *_body(record),
            "</body></html>\n",
        )
    )


def _body(record: Record) -> Iterator[str]:
    rows = record.rows()
    yield f'<p class="dim">{escape(_setting(record))}</p>'
    for phase in PHASES:
        titles = {name: getattr(record.work, name) for name in record.work.__slots__}
        yield f"<h2>{escape(_TITLES[phase].format(**titles))}</h2>"
        yield f"<figure>{_chart(record, rows, phase)}<figcaption>Dots: single runs; bar: their "
        yield f"median; {_BETTER[phase]}. The vertical mark is the machine's limit, measured "
        yield "just before each run (median).</figcaption></figure>"
        yield _figures(rows, phase)
    yield "<p class=dim>Medians (10th to 90th percentile). “Our speedup”: how many times faster "
    yield "Penstock is in the same round; below 1 it is slower. Times of different rounds "
    yield "are not compared, because the machine's speed varies.</p>"
    yield "<h2>Agreement of tokens</h2>"
    yield _agreement(rows)
    yield "<h2>Engines</h2>"
    yield _abouts(record, rows)
    yield from _left_out(record)
    yield "<h2>Machine during the measurement</h2>"
    yield _limits(record)


def _setting(record: Record) -> str:
    machine = record.machine
    return (
        f"{machine['cpu']}, {machine['cpus']} cores, {machine['memory_gib']} GiB; "
        f"{record.threads} threads for every engine. Greedy, forced lengths, prefix caches off. "
        f"Measured {', '.join(record.dates)}; commit {', '.join(record.commits) or 'unknown'}."
    )


def _chart(record: Record, rows: Sequence[Row], phase: str) -> str:
    lines = []
    for row in rows:
        values = [value(run, record.work, phase) for run in row.runs]
        limits = [limit(run, record.work, record.cost, phase) for run in row.runs]
        kind = "ours" if row.engine.is_ours else "peer"
        lines.append(Strip(row.engine.title, kind, values, Quantiles.of(limits).median))
    return strips(lines, UNITS[phase])


def _table(heads: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return an HTML table. `rows` are pairs of (CSS class, cells).

    A tab at the start of a cell marks it as text, which is left-aligned and may have line breaks.
    """
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(
        f'<tr class="{kind}">' + "".join(_cell(cell) for cell in cells) + "</tr>"
        for kind, cells in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _cell(text: str) -> str:
    words = ' class="words"' if text.startswith("\t") else ""
    return f"<td{words}>{escape(text.strip())}</td>"


def _figures(rows: Sequence[Row], phase: str) -> str:
    return _table(
        ["engine", UNITS[phase], "fraction of the limit", "our speedup"],
        [(_kind(row), [row.engine.title, *_cells(row, phase)]) for row in rows],
    )


def _cells(row: Row, phase: str) -> Iterator[str]:
    yield brief(row.values[phase])
    yield f"{100 * row.reached[phase].median:.0f}%"
    yield brief(row.ahead[phase]) if row.ahead else ""


def brief(quantiles: Quantiles) -> str:
    """Return the median, followed by the 10th and 90th percentile in brackets."""
    return f"{quantiles.median:.3g} ({quantiles.low:.3g} to {quantiles.high:.3g})"


def _kind(row: Row) -> str:
    return "ours" if row.engine.is_ours else ""


def _agreement(rows: Sequence[Row]) -> str:
    compared = [(row, row.tokens) for row in rows if row.tokens]
    if not compared:
        return "<p>Not compared: no reference engine was measured.</p>"
    return _table(
        [
            "engine",
            "compared with",
            "tokens before the first that differs",
            "of",
            "earliest difference",
        ],
        [
            (
                _kind(row),
                [
                    row.engine.title,
                    BY_NAME[row.engine.reference].title,
                    str(tokens.agreeing),
                    str(tokens.total),
                    "none"
                    if tokens.first_divergence is None
                    else f"token {tokens.first_divergence}",
                ],
            )
            for row, tokens in compared
        ],
    )


def _abouts(record: Record, rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        about = record.about.get(row.engine.name, {})
        text = ", ".join(f"{key.replace('_', ' ')}: {_plain(each)}" for key, each in about.items())
        lines.append((_kind(row), [row.engine.title, f"{row.memory_mib:.0f}", "\t" + text]))
    return _table(["engine", "memory, MiB", ""], lines)


def _plain(each: Any) -> str:
    return {True: "on", False: "off"}.get(each, str(each)) if isinstance(each, bool) else str(each)


def _left_out(record: Record) -> Iterator[str]:
    reasons = [f"{BY_NAME[name].title} ({why})" for name, why in record.left_out.items()]
    if reasons:
        yield f"<p>Not measured: {escape('; '.join(reasons))}.</p>"


def _limits(record: Record) -> str:
    runs = [run for each in record.rounds for run in each]
    cells = [
        [
            f"{number + 1}",
            "\t" + BY_NAME[run.engine].title,
            f"{run.limits['gflops']:.0f}",
            f"{run.limits['int8_gops']:.0f}",
            f"{run.limits['memory_gbs']:.1f}",
            f"{run.own_cores:.2f}",
            f"{run.other_cores:.2f}",
            f"{run.stolen_cores:.2f}",
        ]
        for number, run in enumerate(runs)
    ]
    heads = ["run", "engine", "fp32 GFLOP/s", "INT8 GOP/s", "memory GB/s"]
    heads += ["its cores", "others' cores", "stolen cores"]
    return _table(heads, [("", row) for row in cells])
