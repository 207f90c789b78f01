"""Base classes of parsers for tool calls that are JSON objects."""

from penstock.router.parsers.json_call import JsonCall
from penstock.router.parsers.reader import Reader, State


class JsonReader(Reader):
    """Reads calls such as `{"name": "add", "arguments": {"a": 1}}` anywhere in an answer."""

    def __init__(self) -> None:
        super().__init__()
        self._opened = ""
        self._json = JsonCall(needs_arguments=True)
        self._then: State = self._start
        self._otherwise: State = self._start

    def _begin_json(
        self, opened: str, then: State, otherwise: State, needs_arguments: bool = False
    ) -> bool:
        """Set the state that reads a call.

        Args:
            opened: the text before the call, which is content if no call follows.
            then: the state after the call.
            otherwise: the state after text that is not a call; that text becomes content.
            needs_arguments: whether an object must have arguments to be a call.
        """
        self._opened = opened
        self._json = JsonCall(needs_arguments)
        self._then, self._otherwise = then, otherwise
        self._state = self._read_json
        return True

    def _read_json(self) -> bool:
        call = self._json
        was_known = bool(call.name)
        used = call.feed(self._text)
        self._text = self._text[used:]
        if call.name and not was_known:
            self._add_call(call.name)
        if call.name:
            self._add_arguments(call.take_arguments())
        if call.is_ended or (call.has_failed and call.name):
            self._state = self._then
        elif call.has_failed:
            self._add_content(self._opened + call.raw)
            self._state = self._otherwise
        return True

    def _end(self) -> None:
        if self._state == self._read_json and not self._json.name:
            self._text = self._opened + self._json.raw + self._text
        super()._end()


class JsonListReader(JsonReader):
    """Reads calls in a JSON array: `[{"name": ..., "arguments": ...}, ...]`."""

    def _begin_list(self, opened: str) -> bool:
        """Read an array next.

        If no call follows, the text `opened` before the array becomes content.
        """
        self._opened = opened
        self._state = self._read_bracket
        return True

    def _read_bracket(self) -> bool:
        """Read the start of the array."""
        rest = self._text.lstrip()
        if not rest:
            return False
        self._opened += self._text[: len(self._text) - len(rest)]
        self._text = rest
        if rest[0] != "[":
            self._add_content(self._opened)
            self._state = self._start
            return True
        self._text = rest[1:]
        self._opened += "["
        self._state = self._read_item
        return True

    def _read_item(self) -> bool:
        """Read the next call, or the end of the array."""
        if not self._skip(" \t\r\n,"):
            return False
        if self._text[0] == "{":
            return self._begin_json(self._opened, self._read_next, self._start)
        if self._text[0] == "]":
            self._text = self._text[1:]
            if self._num_calls == 0:
                self._add_content(self._opened + "]")
            self._state = self._after_list
            return True
        self._add_content(self._opened)
        self._state = self._start
        return True

    def _read_next(self) -> bool:
        self._opened = ""
        self._state = self._read_item
        return True

    def _after_list(self) -> bool:
        """Read the text after the array."""
        self._state = self._start
        return True

    def _end(self) -> None:
        if self._state in (self._read_bracket, self._read_item) and not self._num_calls:
            self._text = self._opened + self._text
        super()._end()
