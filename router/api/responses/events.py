"""The typed server-sent events of a response, numbered in order."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from json.encoder import encode_basestring

from penstock.router.api.openai.json_fragments import array
from penstock.router.api.responses.output import OutputItem

END = "}\n\n"

DELTAS: Mapping[str, str] = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}
"""The type of the event for new text of each type of item."""

DONE: Mapping[str, tuple[str, str]] = {
    "message": ("response.output_text.done", "text"),
    "reasoning": ("response.reasoning_text.done", "text"),
    "function_call": ("response.function_call_arguments.done", "arguments"),
}
"""The type of the event for the whole text of an item, and the member that has the text."""


class EventStream:
    """Makes the events of one response.

    Attributes:
        num_events: number of events that were made.
    """

    def __init__(self) -> None:
        self.num_events = 0
        # The constant JSON of the events for new text: before the sequence number, and after the
        # text.
        self._before = self._after = ""

    def event(self, kind: str, members: Iterable[str]) -> Iterator[str]:
        """Yield an event; `members` are the members of its object, as JSON in fragments."""
        yield f'event: {kind}\ndata: {{"type":"{kind}","sequence_number":{self.num_events},'
        yield from members
        yield END
        self.num_events += 1  # an event whose members raise an error is not counted

    def response(self, kind: str, response: Iterable[str]) -> Iterator[str]:
        """Yield an event with the whole response."""
        return self.event(f"response.{kind}", chain(('"response":',), response))

    def begin_item(self, item: OutputItem) -> Iterator[str]:
        """Yield the events at the start of an item."""
        location = f'"output_index":{item.index},"item":'
        yield from self.event("response.output_item.added", (location, item.begun_json()))
        if item.has_content:
            part = (_location(item), ',"part":', item.empty_content_json())
            yield from self.event("response.content_part.added", part)
        kind = DELTAS[item.kind]
        self._before = (
            f'event: {kind}\ndata: {{"type":"{kind}",{_location(item)},"sequence_number":'
        )
        self._after = ',"logprobs":[]' + END if item.kind == "message" else END

    def text(self, text: str, logprobs: Sequence[str] = ()) -> str:
        """Return the event for new text of the last item."""
        after = f',"logprobs":[{",".join(logprobs)}]{END}' if logprobs else self._after
        number = self.num_events
        self.num_events += 1
        return f'{self._before}{number},"delta":{encode_basestring(text)}{after}'

    def end_item(self, item: OutputItem, status: str) -> Iterator[str]:
        """Yield the events at the end of an item."""
        kind, member = DONE[item.kind]
        yield from self.event(kind, _done_members(item, member))
        if item.has_content:
            part = chain((_location(item), ',"part":'), item.content_json())
            yield from self.event("response.content_part.done", part)
        members = chain((f'"output_index":{item.index},"item":',), item.json(status))
        yield from self.event("response.output_item.done", members)


def _location(item: OutputItem) -> str:
    location = f'"item_id":"{item.id}","output_index":{item.index}'
    return f'{location},"content_index":0' if item.has_content else location


def _done_members(item: OutputItem, member: str) -> Iterator[str]:
    yield f'{_location(item)},"{member}":'
    yield from item.text_json()
    if item.kind == "message":
        yield ',"logprobs":'
        yield from array(item.logprobs)
