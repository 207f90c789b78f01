"""Formats the results of a run as text."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.loadtests.gpu.sections import Outcome

Row = Sequence[str]


def report(outcomes: Sequence[Outcome], on: Mapping[str, Any], is_small: bool) -> str:
    """Return the report: each section with its verdict, its failures and its tables.

    Args:
        on: the device and the versions.
        is_small: whether sizes are tiny.
    """
    lines = [", ".join(f"{name} {value}" for name, value in on.items())]
    if is_small:
        lines.append("REHEARSAL with tiny sizes: the times and goals mean nothing")
    lines.append("")
    lines += [line for outcome in outcomes for line in _section(outcome)]
    names = {
        verdict: [each.name for each in outcomes if _verdict(each).startswith(verdict)]
        for verdict in ("passed", "FAILED", "NOT RUN")
    }
    lines += [f"{verdict}: {', '.join(each)}" for verdict, each in names.items() if each]
    return "\n".join(lines)


def _section(outcome: Outcome) -> Iterator[str]:
    figures = outcome.figures
    yield f"{outcome.name}: {_verdict(outcome)} in {outcome.seconds:.0f} s"
    for reason in outcome.failures:
        yield "    " + reason.replace("\n", "\n    ")
    if "rows" in figures:
        yield from columns(OPERATION, [_operation(row) for row in figures["rows"]])
    if "cases" in figures:
        yield f"    {figures['compiled']} kernels compiled"
        yield from (f"    rule of make aot: {complaint}" for complaint in figures["complaints"])
        yield from columns(CASE, [_case(row) for row in figures["cases"]])
    yield from _named_rows(figures)
    if "bytes_per_second" in figures:
        yield f"    copy {figures['bytes_per_second'] / 1e9:.3g} GB/s (read and written)"
        yield f"    product {figures['flops_per_second'] / 1e12:.3g} TFLOP/s"
    for name, each in figures.get("lost_peer", {}).items():
        yield f"    source killed, {name}: {_lost(each)}"
    for name, each in figures.get("files", {}).items():
        yield f"    {name}: {each['said']}"
    yield ""


def _verdict(outcome: Outcome) -> str:
    if outcome.passed and "not_run" in outcome.figures:
        return f"NOT RUN ({outcome.figures['not_run']})"
    return "passed" if outcome.passed else "FAILED"


def _named_rows(figures: Mapping[str, Any]) -> Iterator[str]:
    if "about" in figures:
        yield f"    {figures['about']}"
    for key, (heading, make_row) in NAMED_ROWS.items():
        if key in figures:
            yield from columns(heading, [make_row(*item) for item in figures[key].items()])


CASE = ("case", "dtype", "outcome", "error", "limit", "s")


def _case(row: Mapping[str, Any]) -> Row:
    errors = (f"{row[key]:.1e}" if key in row else "" for key in ("error", "limit"))
    seconds = f"{row['seconds']:.1f}" if "seconds" in row else ""
    return (row["case"], row["dtype"], row["outcome"], *errors, seconds)


OPERATION = ("operation", "µs", "of bound", "TFLOP/s", "goal", "met", "best peer", "of its speed")


def _operation(row: Mapping[str, Any]) -> Row:
    ratio = row["of_best_peer"]
    return (
        row["name"] + ("" if row["captured"] else " (uncaptured)"),
        f"{row['us']:.1f}",
        f"{row['share']:.0%}",
        f"{row['tflops']:.0f}" if row["tflops"] >= 1 else "",
        row["goal"],
        {True: "yes", False: "no", None: "not compared"}[row["met"]],
        row["best_peer"] or ", ".join(["none", *(f"no {name}" for name in row["absent"])]),
        "" if ratio is None else f"{ratio:.2f}",
    )


BATCH = ("batch", "step µs", "p99", "bytes' µs", "over", "gap p50 µs", "gap p99", "waits")


def _batch(batch: str, row: Mapping[str, Any]) -> Row:
    return (
        batch,
        f"{row['step_us']:.0f}",
        f"{row['step_p99_us']:.0f}",
        f"{row['floor_us']:.0f}",
        f"{row['over_floor']:.2f}x",
        f"{row['gap_p50_us']:.0f}",
        f"{row['gap_p99_us']:.0f}",
        ", ".join(row["waits"]) or "none",
    )


PRICE = ("what", "plain µs", "deterministic µs", "times", "least", "most")


def _price(name: str, row: Mapping[str, float]) -> Row:
    times = (f"{row[key]:.2f}x" for key in ("times", "least", "most"))
    return (name, f"{row['plain_us']:.0f}", f"{row['deterministic_us']:.0f}", *times)


LOAD = (
    *("load", "tokens/s", "of torch's", "first token ms", "speed", "p99", "speed"),
    *("per token ms", "speed", "p99", "speed", "equal first tokens"),
)
_LATENCIES = ("first_token_p50_us", "first_token_p99_us", "per_token_p50_us", "per_token_p99_us")


def _load(name: str, row: Mapping[str, Any]) -> Row:
    ours, ratios = row["ours"], row["ratios"]
    cells = [f"{ours['tokens_per_second']:.0f}", f"{ratios['tokens_per_second']:.2f}x"]
    for key in _LATENCIES:
        cells += [f"{ours[key] / 1e3:.1f}", f"{ratios[key]:.2f}x"] if key in ours else ["", ""]
    return (name, *cells, f"{row['equal_first_tokens']:.0%}")


COLLECTIVE = ("collective", "µs", "GB/s", "error", "result")


def _collective(name: str, row: Mapping[str, Any]) -> Row:
    rate = row["bytes"] / row["us"] / 1e3
    result = "right" if row["passed"] else "WRONG"
    return (
        name + ("" if row["captured"] else " (uncaptured)"),
        f"{row['us']:.1f}",
        f"{rate:.2f}",
        f"{row['error']:.1e}",
        result,
    )


RANKS_LOAD = (
    *("load", "tokens/s", "of one rank's", "first token ms", "speed"),
    *("per token ms", "speed", "equal first tokens", "equal answers"),
)


def _ranks_load(name: str, row: Mapping[str, Any]) -> Row:
    two, ratios = row["two_ranks"], row["ratios"]
    cells = [f"{two['tokens_per_second']:.0f}", f"{ratios['tokens_per_second']:.2f}x"]
    for key in ("first_token_p50_us", "per_token_p50_us"):
        cells += [f"{two[key] / 1e3:.1f}", f"{ratios[key]:.2f}x"]
    return (name, *cells, f"{row['equal_first_tokens']:.0%}", f"{row['equal_answers']:.0%}")


TUNED = ("kernel", "default", "best", "speed", "least", "timed", "passed", "candidates")


def _tuned(name: str, row: Mapping[str, Any]) -> Row:
    sizes = ("/".join(map(str, row[key].values())) for key in ("default", "best"))
    gains = (f"{row[key]:.2f}x" for key in ("gain", "least_gain"))
    counts = (str(row[key]) for key in ("num_timed", "num_passed", "num_candidates"))
    return (name, *sizes, *gains, *counts)


def _lost(row: Mapping[str, Any]) -> str:
    if "not_run" in row:
        return f"NOT RUN ({row['not_run']})"
    if not {"lost_seconds", "recovery_seconds"} <= row.keys():
        return "FAILED"
    return (
        f"noticed after {row['lost_seconds']:.2f} s ({row['error']}), "
        f"pair released in {row['release_seconds']:.2f} s, "
        f"received from another source {row['recovery_seconds']:.2f} s later"
    )


NAMED_ROWS: dict[str, tuple[Row, Callable[[str, Mapping[str, Any]], Row]]] = {
    "batches": (BATCH, _batch),
    "prices": (PRICE, _price),
    "loads": (LOAD, _load),
    "tuned": (TUNED, _tuned),
    "collectives": (COLLECTIVE, _collective),
    "loads_of_ranks": (RANKS_LOAD, _ranks_load),
}
"""Heading of the table and function that formats a row, by key of the figures with named rows."""


def columns(head: Row, rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of an aligned table whose first column is left-aligned.

    Yields nothing if there are no rows.
    """
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        first, *others = zip(row, widths, strict=True)
        cells = [first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)]
        yield "    " + "  ".join(cells).rstrip()
