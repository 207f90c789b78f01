"""Answers in OpenAI's format, as complete responses and as chunks of server-sent events.

For speed, the constant parts of a chunk are serialized once per call.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from penstock.router.api.http import error_body
from penstock.router.api.openai.json_fragments import (
    TOKENS_PER_FRAGMENT,
    Columns,
    array,
    dumps,
    ids,
)
from penstock.router.api.openai.response_context import (
    Logprobs,
    ResponseContext,
    alternatives,
    finite,
)
from penstock.router.api.openai.text_offsets import TextOffsets
from penstock.router.api.openai.token_chunks import PLAIN, StreamProgress, TokenChunks
from penstock.router.api.openai.token_logprobs import logprobs_json
from penstock.router.errors import ServingError
from penstock.router.requests.json_text import string
from penstock.router.requests.response_stream import Delta

DONE = "data: [DONE]\n\n"
"""The event that ends every stream."""

LOGPROB_COLUMNS = ("text_offset", "token_logprobs", "tokens", "top_logprobs")


def error_events(error: ServingError) -> Iterator[str]:
    """Yield the events that end a stream with an error."""
    yield f"data: {dumps(error_body(error))}\n\n{DONE}"


class CompletionFormatter:
    """A formatter of `text_completion` objects."""

    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self.error_events = error_events
        self._progress = StreamProgress()
        self.token_chunks = TokenChunks(self._progress, context.wants_only_text)
        self.token_chunk = self.token_chunks.get
        self._head = dumps(context.header("text_completion"))[:-1]
        # Logprobs of each echoed prompt, by prompt index; all choices of a prompt repeat them.
        self._echoed: dict[int, tuple[Columns, TextOffsets]] = {}
        self._tables: dict[int, list[str]] = {}

    def full_response(self, deltas: Sequence[Delta]) -> Iterator[str]:
        yield self._head + ',"choices":['
        for number, delta in enumerate(deltas):
            yield "," if number else ""
            yield from self._choice(delta)
            if self._context.num_prompt_logprobs is not None:
                yield ',"prompt_logprobs":'
                yield from self._prompt_table(delta.index)
            yield "}"
        yield f'],"usage":{dumps(self._context.usage(self._progress.num_tokens))}}}'

    def chunk(self, delta: Delta) -> Iterator[str]:
        index = self._context.choice_index(delta)
        self.token_chunks.add(delta, lambda text: self._event(dumps(_plain_choice(index, text))))
        yield f'data: {self._head},"choices":['
        yield from self._choice(delta)
        yield "}]" + self._end()

    def _event(self, choice: str) -> str:
        return f'data: {self._head},"choices":[{choice}]{self._end()}'

    def end_of_stream(self) -> str:
        if not self._context.wants_usage:
            return DONE
        usage = dumps(self._context.usage(self._progress.num_tokens))
        return f'data: {self._head},"choices":[],"usage":{usage}}}\n\n{DONE}'

    def _end(self) -> str:
        return self._context.end_of_chunk(self._progress.num_tokens)

    def _choice(self, delta: Delta) -> Iterator[str]:
        """Yield a choice without its closing brace."""
        call, progress = self._context, self._progress
        index, delta = call.choice_index(delta), call.visible(delta)
        begins = progress.is_first(index)
        yield f'{{"index":{index},"text":'
        yield from string(*(call.echoed(delta) if begins else ()), delta.text)
        yield ',"logprobs":'
        if call.num_logprobs is None:
            yield "null"
            progress.add(index, delta)
        else:
            echoed: Columns | None = None
            if call.echo is not None and begins:
                yield from self._make_echoed(delta.index)
                echoed, offsets = self._echoed[delta.index]
                progress.offsets[index] = offsets.copy()
            columns, offsets = Columns(LOGPROB_COLUMNS), progress.add(index, delta)
            yield from self._fill(columns, delta.tokens, delta.logprobs, offsets)
            yield from columns.after(echoed)
        reasons = dumps({"finish_reason": delta.finish or None, "stop_reason": delta.stop})
        yield "," + reasons[1:-1]
        if call.return_token_ids:
            if begins:
                yield ',"prompt_token_ids":'
                yield from ids(call.prompts[delta.index])
            yield ',"token_ids":'
            yield from ids(delta.tokens)

    def _prompt_table(self, index: int) -> Iterator[str]:
        if index not in self._tables:
            table: list[str] = []
            for fragment in self._context.prompt_table(index):
                table.append(fragment)
                yield ""
            self._tables[index] = table
        yield from array(self._tables[index])

    def _make_echoed(self, index: int) -> Iterator[str]:
        if index not in self._echoed:
            columns, offsets, call = Columns(LOGPROB_COLUMNS), TextOffsets(), self._context
            tokens, entries = call.prompts[index], call.prompt_entries(index)
            yield from self._fill(columns, tokens, entries, offsets)
            self._echoed[index] = columns, offsets

    def _fill(
        self,
        columns: Columns,
        tokens: Sequence[int],
        entries: Sequence[Logprobs | None],
        offsets: TextOffsets,
    ) -> Iterator[str]:
        """Append the logprobs of some tokens to the columns; yield an empty text per step."""
        for start in range(0, len(tokens), TOKENS_PER_FRAGMENT):
            end = start + TOKENS_PER_FRAGMENT
            columns.append(self._logprobs(tokens[start:end], entries[start:end], offsets))
            yield ""

    def _logprobs(
        self, tokens: Sequence[int], entries: Sequence[Logprobs | None], offsets: TextOffsets
    ) -> dict[str, list[Any]]:
        """Return logprobs in the completions format: parallel lists, one entry per token.

        The alternatives of a token include the token itself.
        """
        bytes_of = self._context.token_bytes.bytes_of
        texts = [self._context.token_name(token) for token in tokens]
        return {
            "text_offset": [offsets.add(bytes_of(token)) for token in tokens],
            "token_logprobs": [finite(entry.chosen) if entry else None for entry in entries],
            "tokens": texts,
            "top_logprobs": [
                {text: finite(entry.chosen)} | self._top_logprobs(entry) if entry else None
                for text, entry in zip(texts, entries, strict=True)
            ],
        }

    def _top_logprobs(self, entry: Logprobs) -> dict[str, float]:
        pairs = alternatives(entry)[: self._context.num_logprobs]
        return {self._context.token_name(token): finite(value) for token, value in pairs}


class ChatFormatter:
    """A formatter of `chat.completion` objects."""

    def __init__(self, context: ResponseContext) -> None:
        self._context = context
        self.error_events = error_events
        self._progress = StreamProgress()
        self.token_chunks = TokenChunks(self._progress, context.wants_only_text)
        self.token_chunk = self.token_chunks.get
        self._head = "data: " + dumps(context.header("chat.completion.chunk"))[:-1]

    def full_response(self, deltas: Sequence[Delta]) -> Iterator[str]:
        call = self._context
        yield dumps(call.header("chat.completion"))[:-1] + ',"choices":['
        for number, delta in enumerate(deltas):
            yield "," if number else ""
            yield from self._answer(delta)
            yield "}"
        usage = call.usage(sum(len(delta.tokens) for delta in deltas))
        yield f'],"usage":{dumps(usage)}'
        if call.return_token_ids:
            yield ',"prompt_token_ids":'
            yield from ids(call.prompts[0])
        if call.num_prompt_logprobs is not None:
            yield ',"prompt_logprobs":'
            yield from array(call.prompt_table(0))
        yield "}"

    def _answer(self, delta: Delta) -> Iterator[str]:
        """Yield a choice without its closing brace."""
        index = self._context.choice_index(delta)
        yield f'{{"index":{index},"message":{{"role":"assistant","content":'
        yield from string(*self._context.echoed(delta), delta.text)
        yield ',"refusal":null}'
        yield from self._choice_fields(delta)

    def chunk(self, delta: Delta) -> Iterator[str]:
        index = self._context.choice_index(delta)
        text = delta.text
        if self._progress.is_first(index):
            yield from self._first_chunk(index)
            text = "".join((*self._context.echoed(delta), text))
        self._progress.add(index, delta)
        self.token_chunks.add(
            delta, lambda text: self._event(dumps(_plain_chat_choice(index, text)))
        )
        yield f'{self._head},"choices":[{{"index":{index},"delta":{{'
        if text or not delta.finish:
            yield '"content":'
            yield from string(text)
        yield "}"
        yield from self._choice_fields(delta)
        yield "}]" + self._end()

    def end_of_stream(self) -> str:
        if not self._context.wants_usage:
            return DONE
        usage = dumps(self._context.usage(self._progress.num_tokens))
        return f'{self._head},"choices":[],"usage":{usage}}}\n\n{DONE}'

    def _end(self) -> str:
        return self._context.end_of_chunk(self._progress.num_tokens)

    def _first_chunk(self, index: int) -> Iterator[str]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        yield f'{self._head},"choices":[{dumps(choice)}]'
        if self._context.return_token_ids:
            yield ',"prompt_token_ids":'
            yield from ids(self._context.prompts[0])
        yield self._end()

    def _event(self, choice: str) -> str:
        return f'{self._head},"choices":[{choice}]{self._end()}'

    def _choice_fields(self, delta: Delta) -> Iterator[str]:
        """Yield the fields that follow the text of a choice."""
        yield ',"logprobs":'
        if self._context.num_logprobs is None:
            yield "null"
        else:
            yield '{"content":'
            yield from array(self._logprobs(delta))
            yield ',"refusal":null}'
        reasons = dumps({"finish_reason": delta.finish or None, "stop_reason": delta.stop})
        yield "," + reasons[1:-1]
        if self._context.return_token_ids:
            yield ',"token_ids":'
            yield from ids(delta.tokens)

    def _logprobs(self, delta: Delta) -> Iterator[str]:
        """Yield logprobs in the chat format: one object per token, with the token's bytes."""
        token_bytes, as_ids = self._context.token_bytes, self._context.tokens_as_ids
        for start in range(0, len(delta.tokens), TOKENS_PER_FRAGMENT):
            end = start + TOKENS_PER_FRAGMENT
            pairs = zip(delta.tokens[start:end], delta.logprobs[start:end], strict=True)
            yield ",".join([logprobs_json(token_bytes, *pair, as_ids) for pair in pairs])


def _plain_choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, **PLAIN}


def _plain_chat_choice(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "delta": {"content": text}, **PLAIN}
