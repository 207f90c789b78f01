"""Renders the explanation of a request as a timeline for a terminal with 80 columns."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from penstock.cli.status_view import duration, number

Json: TypeAlias = Mapping[str, Any]

BAR = 40  # width of the bar that shows the phases of a request, in characters

COLOURS = {
    "queue": "yellow",
    "worker_queue": "dark_orange",
    "prefill": "blue",
    "wait": "magenta",
    "transfer": "cyan",
    "decode": "green",
    "recovery": "red",
}

TEXTS = {
    "arrived": "arrived with {tokens} tokens",
    "placed": "placed on {worker}{then}",
    "submitted": "sent to {worker}{source}",
    "admitted": "admitted by {worker}; {tokens} prompt tokens were cached",
    "readmitted": "admitted again by {worker}; {tokens} prompt tokens were cached",
    "first_token": "first token from {worker}",
    "continued": "next token from {worker}",
    "yielded": "{worker} yielded and keeps the KV of {tokens} tokens",
    "transfer_started": "KV transfer from {other_worker} to {worker}",
    "transfer_ended": "{worker} received {size}",
    "transfer_failed": "the KV transfer to {worker} failed",
    "rejected": "{worker} rejected the request",
    "worker_lost": "{worker} was lost",
    "ended": "ended after {tokens} tokens",
}
"""Text for each kind of event. For kinds that are missing here, the name of the kind is shown."""

BAD = ("readmitted", "transfer_failed", "rejected", "worker_lost")


def timeline(found: Json) -> RenderableType:
    """Render the JSON that `/v1/requests/ID/explain` returns."""
    sections: list[RenderableType] = [
        Text.assemble((str(found["request_id"]), "bold"), f" at {found['router']}")
    ]
    if found["left_out"]:
        sections.append(Text(f"{found['left_out']} older requests of this id are not shown"))
    for index, request in enumerate(found["requests"]):
        if len(found["requests"]) > 1:
            sections.append(Text(f"\nprompt {index + 1}", style="bold"))
        sections += _request(request)
    return Group(*sections)


def _request(request: Json) -> Iterator[RenderableType]:
    yield _summary(request)
    yield _bar(request["times"], request["seconds"])
    events = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    events.add_column(justify="right", no_wrap=True)
    events.add_column()
    for event in request["events"]:
        events.add_row(Text(f"+{duration(event['seconds'])}", style="dim"), _event(event))
    yield events
    if request["events_left_out"]:
        yield Text(f"{request['events_left_out']} later events are not kept", style="dim")


def _summary(request: Json) -> Text:
    ended = request["finish_reason"]
    text = Text()
    text.append(ended or request["state"], style="green" if ended in ("stop", "length") else "red")
    text.append(
        f" after {duration(request['seconds'])}, for {request['tenant']}: "
        f"{number(request['prompt_tokens'])} prompt tokens "
        f"({number(request['cached_prompt_tokens'])} cached), "
        f"{number(request['completion_tokens'])} generated"
    )
    if request["first_token_seconds"]:
        text.append(f"\nfirst token after {duration(request['first_token_seconds'])}")
        if request["prefill_steps"]:
            count = request["prefill_steps"]
            text.append(f", in {count} step{'s' * (count != 1)}")
    counts = {name: request[name] for name in ("preemptions", "failovers", "migrations")}
    if request["transferred_bytes"]:
        counts["KV bytes transferred"] = request["transferred_bytes"]
    several = [f"{name}: {number(count)}" for name, count in counts.items() if count]
    if several:
        text.append("\n" + ", ".join(several))
    return text


def _bar(times: Sequence[Json], seconds: float) -> Text:
    """Return a bar that shows the phases of a request, with their durations below it."""
    bar, names = Text(), Text()
    spent = [(each["phase"], each["seconds"]) for each in times if each["seconds"] > 0]
    end, drawn = 0.0, 0
    for phase, duration_seconds in spent:
        end += duration_seconds
        column = max(round(BAR * end / seconds), drawn + 1) if seconds else drawn + 1
        bar.append("█" * (column - drawn), style=COLOURS.get(phase, "white"))
        drawn = column
        names.append("■ ", style=COLOURS.get(phase, "white"))
        names.append(f"{phase.replace('_', ' ')} {duration(duration_seconds)}  ")
    return Text.assemble(bar, "\n", names)


def _event(event: Json) -> RenderableType:
    other = event["other_worker"]
    text = TEXTS.get(str(event["kind"]), str(event["kind"])).format(
        worker=event["worker"] or "a worker",
        other_worker=other,
        tokens=number(event["tokens"]),
        size=f"{number(event['bytes'])}B" if event["bytes"] else "the KV blocks",
        then=f", then {other}" if other else "",
        source=f", with KV from {other}" if other else "",
    )
    line = Text(text, style="red" if event["kind"] in BAD else "")
    if event["detail"]:
        line.append(f": {event['detail']}", style="dim")
    if not event["candidates"]:
        return line
    return Group(line, Padding(_candidates(event), (0, 0, 0, 2)))


def _candidates(event: Json) -> Table:
    """Return a table of the workers that the router compared. The chosen workers are marked."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    names = ("", "worker", "role", "cost", "queued", "sequences", "cached", "")
    for column, name in enumerate(names):
        table.add_column(name, justify="right" if 3 <= column <= 6 else "left", no_wrap=True)
    chosen = (event["worker"], event["other_worker"])
    for each in event["candidates"]:
        state = (
            each["state"] if each["state"] != "ready" else "" if each["has_capacity"] else "full"
        )
        table.add_row(
            "→" if each["worker"] in chosen else "",
            each["worker"],
            each["role"],
            number(each["cost"]),
            number(each["queued_tokens"]),
            str(each["sequences"]),
            number(each["cached_tokens"]),
            state,
        )
    left = event["num_workers"] - len(event["candidates"])
    if left > 0:
        table.add_row("", f"and {left} more")
    return table
