"""Renders the status of a router as tables for a terminal with 80 columns."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

Json: TypeAlias = Mapping[str, Any]

COLOURS = {
    "ready": "green",
    "draining": "yellow",
    "suspect": "yellow",
    "waiting": "yellow",  # state of a router that has no workers yet
    "stuck": "red",
    "down": "red",
}
BAR = 8  # width of the bar that shows the KV usage, in characters
NOTHING = "-"


def page(status: Json, url: str, now: float) -> RenderableType:
    """Render a status as tables.

    Args:
        status: the JSON that `/status` returns.
        url: URL of the router, for the first line.
        now: present time, in seconds since 1970.
    """
    sections: list[RenderableType] = [_head(status, url)]
    if len(status["routers"]) > 1:
        sections.append(_routers(status["routers"]))
    if status["pools"]:
        sections.append(_pools(status["pools"], status["scaling"]["pools"]))
    if status["workers"]:
        sections.append(_workers(status["workers"]))
    if status.get("roles"):
        sections.append(_roles(status["roles"], now))
    if status["scaling"]["pools"]:
        sections.append(_scaling(status["scaling"], now))
    return Group(*sections, _totals(status))


def number(value: float) -> str:
    """Format a number with few characters, for example 999, 1.2k, 34k or 5.6M."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(value) < 999.5 or unit == "T":
            break
        value /= 1000
    return f"{value:.1f}{unit}" if unit and abs(value) < 9.95 else f"{value:.0f}{unit}"


def duration(seconds: float) -> str:
    """Format a duration with few characters, for example 3.4 ms, 120 ms, 12.3 s, 14 min or 3 h."""
    if seconds >= 599.5:
        return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"
    if seconds >= 0.9995:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def _head(status: Json, url: str) -> Text:
    why_not = status["not_ready"]
    head = Text()
    head.append(str(status["model"]), style="bold")
    head.append(f" at {url}: ")
    head.append(why_not or "serving", style="red" if why_not else "green")
    head.append(
        f"\n{number(status['streams'])} open requests, {number(status['waiting'])} of them queued "
        f"here with {number(status['waiting_tokens'])} tokens\n"
    )
    return head


def _table(*columns: str, left: int = 1, gap: int = 2) -> Table:
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold dim")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index < left else "right", no_wrap=True)
    return table


def _routers(routers: Sequence[Json]) -> Table:
    table = _table("router", "state", "HTTP", "gRPC", "open", "waiting", "tokens", left=4)
    for router in routers:
        counts = (number(router[name]) for name in ("streams", "waiting", "waiting_tokens"))
        state = Text(router["state"], style=COLOURS.get(router["state"], ""))
        table.add_row(router["router"], state, router["http"], router["grpc"], *counts)
    table.add_row()
    return table


def _pools(pools: Sequence[Json], sizes: Sequence[Json]) -> Table:
    counts = ("desired", "pending", "workers", "ready")
    table = _table("pool", *counts, "running", "waiting", "tokens waiting")
    by_pool = {size["pool"]: size for size in sizes}
    for pool in pools:
        size = by_pool.get(pool["pool"], {})
        short = pool["ready"] < size.get("desired", pool["workers"])
        ready = Text(str(pool["ready"]), style="red" if short else "")
        table.add_row(
            pool["pool"],
            str(size.get("desired", NOTHING)),
            str(size.get("pending", NOTHING)),
            str(pool["workers"]),
            ready,
            number(pool["running"]),
            number(pool["waiting"]),
            number(pool["waiting_tokens"]),
        )
    table.add_row()
    return table


def _workers(workers: Sequence[Json]) -> Table:
    columns = ("worker", "state", "KV in use", "of", "run", "wait", "tokens", "hits", "preempt")
    table = _table(*columns, "step", left=3, gap=1)
    table.columns[0].max_width = 17
    for worker in workers:
        state = Text(worker["state"], style=COLOURS.get(worker["state"], ""))
        table.add_row(worker["worker"], state, *_numbers(worker["numbers"]))
    table.add_row()
    return table


def _roles(roles: Mapping[str, Json], now: float) -> Text:
    """Return the roles that operators have set, with one line per worker."""
    text = Text()
    for worker, given in sorted(roles.items()):
        since = duration(max(now - given["at"], 0.0))
        text.append(f"{worker}: a {given['role']} worker for {since}, set by {given['by']}\n")
    return text


def _numbers(numbers: Json | None) -> list[str | Text]:
    if numbers is None:
        return [NOTHING] * 8
    prompt = numbers["prompt_tokens"]
    return [
        _kv(numbers["blocks"]),
        number(numbers["kv_tokens"]),
        number(numbers["running"]),
        number(numbers["waiting"]),
        number(numbers["waiting_tokens"]),
        f"{numbers['prefix_hit_tokens'] / prompt:.0%}" if prompt else NOTHING,
        number(numbers["preemptions"]),
        duration(numbers["step_seconds"]),
    ]


def _kv(blocks: Mapping[str, int]) -> Text:
    """Return a bar that shows the fraction of the KV blocks in use.

    Leased and reserved blocks have another colour than used blocks.
    """
    total = sum(blocks.values())
    held = blocks["leased"] + blocks["reserved"]
    fraction = (blocks["used"] + held) / total if total else 0.0
    full = round(fraction * BAR)
    moving = round(held / total * BAR) if total else 0
    bar = Text()
    bar.append("█" * (full - moving), style="cyan")
    bar.append("█" * moving, style="magenta")
    bar.append("░" * (BAR - full), style="dim")
    bar.append(f" {fraction:4.0%}")
    return bar


def _scaling(scaling: Json, now: float) -> Text:
    """Return the reason for the size of each pool, and the last changes of pool sizes."""
    text = Text()
    for size in scaling["pools"]:
        text.append(f"{_why(size)}\n")
        for wait in size.get("waits", ()):
            text.append(f"  {wait}\n", style="yellow")
        if lost := size.get("given_up", 0):
            failing = f"  {lost} failed to start and will be retried: see the log\n"
            text.append(failing, style="red")
    for note in scaling["decisions"]:
        text.append(f"{duration(max(now - note['at'], 0.0))} ago: {note['text']}\n", style="dim")
    return text


def _why(size: Json) -> str:
    """Return a line with the reason for the size of a pool."""
    pool, least, most = size["pool"], size["least"], size["most"]
    if least == most:  # the size of this pool is fixed
        return f"{pool}, always {least}: {size['reason']}"
    held = f"; held by {size['held_by']}" if size["held_by"] else ""
    return f"{pool}, {least} to {most}: {size['reason']}{held}"


def _totals(status: Json) -> Text:
    ended = [f"{count} {reason}" for reason, count in status["finished"].items() if count]
    text = Text("since the router's start: ", style="dim")
    text.append(
        f"{number(sum(status['generated'].values()))} tokens; "
        f"ended: {', '.join(ended) or 'nothing'}; "
        f"{number(status['kv_transfers'])} KV transfers of "
        f"{status['kv_transfer_bytes'] / 1e6:.1f} MB "
        f"({number(status['kv_transfers_failed'])} failed), {number(status['failovers'])} failovers"
    )
    decisions = status.get("placed") or {}
    if decisions:
        most = sorted(decisions.items(), key=lambda each: -each[1])
        text.append("\nprompts computed ")
        text.append("; ".join(f"{where} {number(count)}" for where, count in most))
    return text
